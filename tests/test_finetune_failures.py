"""The Accelerate recipe when things go wrong, and what comes from or goes to elsewhere: data, adapters, a hub."""

import errno
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import finetune
import finetune_losses
import pytest
import torch
from accelerate import Accelerator
from finetune_errors import explain, writing
from hub_server import TOKEN, environment, serving
from recipe_runs import arguments, assert_same_weights, forget_runs, run, weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer

RECIPES = Path(__file__).parents[1] / "recipes"
STEPS = ["--max_steps", 6, "--eval_steps", 2, "--best_metric", "loss"]


def stop_with(error, monkeypatch, at):
    """The recipe's `train_batch`, or what else is named, raises the error the `at`-th time; counts from 1."""
    original, count = finetune.train_batch, []

    def failing(*arguments):
        count.append(1)
        if len(count) == at:
            raise error
        return original(*arguments)

    monkeypatch.setattr(finetune, "train_batch", failing)


def half_written(folder):
    """What is neither data nor a whole checkpoint in a folder and in its out-run."""
    beside = {path.name for path in folder.iterdir()} - {"out-run"}
    return beside | {path.name for path in (folder / "out-run").iterdir() if not path.name.startswith("checkpoint-")}


def assert_goes_on(models, data, tmp_path, last):
    """The last checkpoint is whole: a resumed run ends as an uninterrupted one, and leaves nothing half-written."""
    assert (tmp_path / "out-run" / last).is_dir()
    again = run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS, "--resume")
    assert half_written(tmp_path) == {"out"}
    whole = run(models / "encoder-primal", data / "rows.csv", tmp_path / "whole", *STEPS)
    assert whole["best_step"] == 6  # weights from before the failure would be the same in any case
    assert again["history"] == whole["history"]
    assert_same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory; lower --batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; lower --batch_size"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; free some room"),
        (KeyboardInterrupt(), "interrupted; go on from the last checkpoint"),
    ],
    ids=["accelerator", "memory", "disk", "interrupted"],
)
def test_the_program_ends_with_one_line_of_its_own(error, line, models, data, tmp_path, monkeypatch, capsys):
    def failing(*arguments):
        raise error

    forget_runs()
    monkeypatch.setattr(finetune_losses, "task_loss", failing)
    call = arguments(models / "encoder-primal", data / "rows.csv", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["finetune.py", *call])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(RECIPES / "finetune.py"), run_name="__main__")
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and lines[-1].startswith(f"finetune: {line}"), lines
    assert not [one for one in lines if "Traceback" in one]


@pytest.mark.usefixtures("without_reload")
def test_what_stopped_before_its_first_checkpoint_starts_again_and_what_has_one_does_not(models, data, tmp_path):
    place = (models / "encoder-primal", data / "rows.csv", tmp_path / "out")
    with pytest.raises(ValueError, match="has no column 'nothing'"):
        run(*place, "--label_column", "nothing")
    run(*place)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ValueError, match="it or its -run exists; use --resume"):
        run(*place)


@pytest.mark.usefixtures("without_reload")
def test_out_of_memory_is_one_line_and_the_last_checkpoint_is_whole(models, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_with(torch.OutOfMemoryError("CUDA out of memory"), patch, at=4)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS)
    assert explain(caught.value).startswith("out of memory") and not half_written(tmp_path)
    assert explain(RuntimeError("shapes do not fit")) is None
    assert_goes_on(models, data, tmp_path, "checkpoint-0-2")


@pytest.mark.usefixtures("without_reload")
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
    assert explain(caught.value).startswith("the disk is full") and not half_written(tmp_path)
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


@pytest.mark.usefixtures("without_reload")
def test_a_process_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(models, data, tmp_path):
    call = arguments(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *STEPS)
    child = subprocess.run([sys.executable, "-c", KILLED, RECIPES, *call], capture_output=True, text=True, timeout=120)
    assert child.returncode == -9, child.stderr[-2000:]
    assert half_written(tmp_path) == {"writing-checkpoint-0-4"}
    scratch = tmp_path / "out-run" / "writing-checkpoint-0-4"
    scratch.rename(scratch.with_name("writing-checkpoint-0-3"))  # of a step that the resumed run does not write
    assert_goes_on(models, data, tmp_path, "checkpoint-0-2")


@pytest.mark.usefixtures("without_reload")
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


@pytest.mark.usefixtures("without_reload")
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
sys.modules["hf_primal"] = None
from transformers import AutoModelForSequenceClassification as Auto, AutoTokenizer
model = Auto.from_pretrained("user/tuned", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("user/tuned", trust_remote_code=True)
print(json.dumps(model(**tokenizer(sys.argv[1], return_tensors="pt")).logits.tolist()))
"""


def test_data_from_a_hub_and_the_result_pushed_to_it(models, data, from_csv, passages, tmp_path):
    (tmp_path / "rows").mkdir()
    for split in ("train", "validation"):
        shutil.copy(data / "rows.csv", tmp_path / "rows" / f"{split}.csv")
    call = [
        sys.executable,
        RECIPES / "finetune.py",
        *arguments(models / "encoder-primal", "user/rows", tmp_path / "out"),
    ]
    with serving() as hub:
        hub.add("datasets/user/rows", tmp_path / "rows")
        env = environment(tmp_path / "home", hub.url, TOKEN)
        child = subprocess.run(
            [*call, "--push_to_hub", "user/tuned", "--private"], env=env, capture_output=True, text=True, timeout=120
        )
        assert child.returncode == 0, child.stderr[-3000:]
        assert f"{hub.url}/user/tuned" in child.stdout and hub.repositories["user/tuned"].private
        loaded = subprocess.run([sys.executable, "-c", LOAD, passages[0]], env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert_same_weights(from_csv, tmp_path / "out")
    assert TOKEN not in child.stdout + child.stderr
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    logits = model(**tokenizer(passages[0], return_tensors="pt")).logits
    torch.testing.assert_close(torch.tensor(json.loads(loaded.stdout.splitlines()[-1])), logits.detach())


def test_no_token_is_told_before_any_work(models, data, tmp_path):
    call = [
        sys.executable,
        RECIPES / "finetune.py",
        *arguments(models / "encoder-primal", data / "rows.csv", tmp_path / "out"),
    ]
    call += ["--push_to_hub", "user/tuned"]
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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # in peft
def test_a_full_disk_leaves_no_half_of_an_adapter(models, data, tmp_path, monkeypatch):
    from peft import PeftModel

    def full(model, folder):
        folder.mkdir()
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PeftModel, "save_pretrained", full)
    with pytest.raises(OSError) as caught:
        run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", "--trains", "primal+lora", "--save_adapter")
    assert caught.value.errno == errno.ENOSPC and not half_written(tmp_path)


@pytest.mark.parametrize("name", ["rouge", "user/metric"])
def test_a_metric_of_a_hub_that_does_not_answer_is_one_line_before_any_work(name, models, data, tmp_path):
    with pytest.raises(ValueError, match=f"^--metrics {name} is neither in recipes/metrics nor on the hub$"):
        run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", "--metrics", name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cell", "column"), [(0, "label"), (1, "text")])
def test_an_empty_cell_is_one_line(cell, column, models, data, tmp_path):
    rows = [["1", "the cat"], ["0", "a dog"], ["1", "it ran"]] * 4
    rows[5][cell] = ""
    (tmp_path / "rows.csv").write_text("\n".join(map(",".join, [["label", "text"], *rows])))
    flags = ["--evaluation", data / "rows.csv"]
    with pytest.raises(ValueError, match=f"^column '{column}' has empty cells; drop those rows$"):
        run(models / "encoder-primal", tmp_path / "rows.csv", tmp_path / "out", *flags)


def test_a_metric_whose_package_is_missing_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(ValueError, match=r"^metric accuracy needs more packages: pip install '.\[recipes\]'"):
        finetune.metric_of("accuracy")
