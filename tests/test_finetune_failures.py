"""The Accelerate recipe when things go wrong, and what comes from or goes to elsewhere: data, adapters, a hub."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import finetune
import pytest
import torch
from accelerate import Accelerator
from finetune_errors import explain, writing
from hub_server import TOKEN, environment, serving
from recipe_runs import assert_same_weights, run, weights
from transformers import AutoModelForSequenceClassification

RECIPES = Path(__file__).parents[1] / "recipes"
STEPS = ["--max_steps", 6, "--eval_steps", 2]


def stop_with(error, monkeypatch, at):
    """The recipe's `train_batch`, or what else is named, raises the error the `at`-th time; counts from 1."""
    original, count = finetune.train_batch, []

    def failing(*arguments):
        count.append(1)
        if len(count) == at:
            raise error
        return original(*arguments)

    monkeypatch.setattr(finetune, "train_batch", failing)


def assert_goes_on(models, data, tmp_path, last):
    """The last checkpoint is whole, nothing half-written is there, and a resumed run ends as an uninterrupted one."""
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    names = [path.name for path in (tmp_path / "out-run").iterdir()]
    assert last in names and not [name for name in names if not name.startswith("checkpoint-")]
    run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS, "--resume")
    run(models / "encoder-primal", data / "rows.csv", tmp_path / "whole", *STEPS)
    assert_same_weights(tmp_path / "whole", tmp_path / "out")


def test_out_of_memory_is_one_line_and_the_last_checkpoint_is_whole(models, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_with(torch.OutOfMemoryError("CUDA out of memory"), patch, at=4)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS)
    for error in (caught.value, RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert explain(error).startswith("out of memory; lower --batch_size")
    assert explain(RuntimeError("shapes do not fit")) is None
    assert_goes_on(models, data, tmp_path, "checkpoint-0-2")


@pytest.mark.parametrize("place", ["checkpoint", "result"])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_whole(place, models, data, tmp_path, monkeypatch):
    """torch.save turns ENOSPC into a RuntimeError of its own."""
    owner, name = (Accelerator, "save_state") if place == "checkpoint" else (finetune, "copy_sentence_modules")
    original, count = getattr(owner, name), []

    def full(*arguments):
        count.append(1)
        result = original(*arguments)
        if len(count) == 2 or place == "result":
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            finally:
                raise RuntimeError("unexpected pos 254144 vs 254036")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(OSError) as caught:
            run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS)
    assert explain(caught.value).startswith("the disk is full; free some room")
    assert_goes_on(models, data, tmp_path, "checkpoint-0-2" if place == "checkpoint" else "checkpoint-0-6")


def test_a_full_disk_that_a_library_does_not_name_is_told_by_its_free_space(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    usage = shutil.disk_usage(tmp_path)
    for free, expected in ((0, OSError), (2**30, RuntimeError)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: usage._replace(free=free))
        with pytest.raises(expected), writing(tmp_path, tmp_path / "scratch"):
            raise RuntimeError("basic_ios::clear: iostream error")
    assert not (tmp_path / "scratch").exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import finetune
from accelerate import Accelerator
save, count = Accelerator.save_state, []

def killed(*arguments):
    save(*arguments)
    count.append(1)
    if len(count) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Accelerator.save_state = killed
finetune.main(sys.argv[1:])
"""


def test_a_process_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(models, data, tmp_path):
    usual = ["--batch_size", 4, "--max_length", 32, "--log_steps", 1, *STEPS]
    call = [sys.executable, "-c", KILLED, RECIPES, "--model", models / "encoder-primal", "--train", data / "rows.csv"]
    child = subprocess.run([*map(str, [*call, "--output", tmp_path / "out", *usual])], capture_output=True, text=True)
    assert child.returncode == -9, child.stderr[-2000:]
    shutil.rmtree(tmp_path / "out-run" / "writing-checkpoint-0-4")  # it was there; a resumed run clears it away too
    assert_goes_on(models, data, tmp_path, "checkpoint-0-2")


def test_early_stopping_keeps_the_best_weights(models, data, tmp_path, monkeypatch):
    values, states = iter([0.5, 0.6, 0.55, 0.6, 0.9]), []

    def measured(run, model, *rest):
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"loss": 1.0, "accuracy": next(values)}

    monkeypatch.setattr(finetune, "evaluate_model", measured)
    flags = ["--max_steps", 10, "--eval_steps", 1, "--patience", 2]
    report = run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *flags)
    assert len(states) == 4 and report["best_step"] == 2 and report["metrics"]["accuracy"] == 0.6
    saved = weights(tmp_path / "out")
    assert all(torch.equal(saved[name], states[1][name]) for name in saved)
    assert not all(torch.equal(saved[name], states[3][name]) for name in saved)


@pytest.fixture(scope="module")
def from_csv(models, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("csv") / "out"
    run(models / "encoder-primal", data / "rows.csv", folder, "--evaluation", data / "rows.csv")
    return folder


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "saved", "saved splits"])
def test_data_of_every_kind_trains_alike(kind, models, data, from_csv, tmp_path):
    rows = datasets.load_dataset("csv", data_files=str(data / "rows.csv"), split="train", cache_dir=tmp_path / "cache")
    path, flags = tmp_path / f"rows.{kind}", ["--evaluation", data / "rows.csv"]
    if kind == "saved":
        rows.save_to_disk(path)
    elif kind == "saved splits":
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(path)
        flags = []
    elif kind == "parquet":
        rows.to_parquet(path)
    else:
        rows.to_json(path, lines=kind == "jsonl")
    report = run(models / "encoder-primal", path, tmp_path / "out", *flags)
    assert_same_weights(from_csv, tmp_path / "out")
    assert report["metrics"] == json.loads((from_csv / "training_report.json").read_text())["metrics"]


LOAD = """
import json, sys
from transformers import AutoModelForSequenceClassification as Auto, AutoTokenizer
model = Auto.from_pretrained("user/tuned", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("user/tuned", trust_remote_code=True)
print(json.dumps(model(**tokenizer(sys.argv[1], return_tensors="pt")).logits.tolist()))
"""


def test_data_from_a_hub_and_the_result_pushed_to_it(models, data, from_csv, passages, tmp_path):
    (tmp_path / "rows").mkdir()
    for split in ("train", "validation"):
        shutil.copy(data / "rows.csv", tmp_path / "rows" / f"{split}.csv")
    call = [sys.executable, RECIPES / "finetune.py", "--model", models / "encoder-primal", "--train", "user/rows"]
    call += ["--output", tmp_path / "out", "--max_steps", 2, "--batch_size", 4, "--max_length", 32, "--log_steps", 1]
    with serving() as hub:
        hub.add("datasets/user/rows", tmp_path / "rows")
        env = environment(tmp_path / "home", hub.url, TOKEN)
        child = subprocess.run(
            [*map(str, call), "--push_to_hub", "user/tuned", "--private"], env=env, capture_output=True, text=True
        )
        assert child.returncode == 0, child.stderr[-3000:]
        assert f"{hub.url}/user/tuned" in child.stdout and hub.repositories["user/tuned"].private
        loaded = subprocess.run([sys.executable, "-c", LOAD, passages[0]], env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert_same_weights(from_csv, tmp_path / "out")
    assert TOKEN not in child.stdout + child.stderr
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    from transformers import AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    logits = model(**tokenizer(passages[0], return_tensors="pt")).logits
    torch.testing.assert_close(torch.tensor(json.loads(loaded.stdout.splitlines()[-1])), logits.detach())


def test_no_token_is_told_before_any_work(models, data, tmp_path):
    call = [sys.executable, RECIPES / "finetune.py", "--model", models / "encoder-primal", "--train", data / "rows.csv"]
    call = [*map(str, [*call, "--output", tmp_path / "out", "--push_to_hub", "user/tuned"])]
    with serving() as hub:
        env = environment(tmp_path / "home", hub.url)
        child = subprocess.run(call, env=env, capture_output=True, text=True)
    assert child.returncode == 2 and "no Hugging Face token: run `hf auth login`" in child.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out-run").exists()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # in peft
def test_an_adapter_saved_alone_gives_what_the_merged_model_gives(models, data, tmp_path):
    from peft import PeftModel

    flags = ["--trains", "primal+lora", "--save_adapter", "--learning_rate", "1e-2"]
    run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *flags)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    base = AutoModelForSequenceClassification.from_pretrained(
        models / "encoder-primal", trust_remote_code=True, num_labels=3
    )
    adapted = PeftModel.from_pretrained(base, tmp_path / "out-run" / "adapter").eval()
    inputs = {"input_ids": torch.randint(5, 26, (3, 20))}
    torch.testing.assert_close(adapted(**inputs).logits, merged(**inputs).logits, atol=1e-5, rtol=1e-5)
    size = sum(path.stat().st_size for path in (tmp_path / "out-run" / "adapter").iterdir())
    assert size < sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))


def test_an_unknown_metric_is_told_in_one_line(models, data, tmp_path):
    with pytest.raises(ValueError, match="--metrics nothing is neither in recipes/metrics nor on the hub"):
        run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", "--metrics", "nothing")
