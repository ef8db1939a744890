"""The Accelerate recipe: every task trains, saves and reloads; a resumed run and two processes change nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import finetune
import pytest
import torch
import transformers
from finetune_config import FineTuneConfig, read_config
from recipe_runs import assert_same_weights, run, weights

RECIPES = Path(__file__).parents[1] / "recipes"


TASKS = {
    "sequence-classification": ("encoder", "rows.csv", ["accuracy"], []),
    "pairs": ("encoder", "rows.csv", ["accuracy"], ["--text_columns", "text", "other"]),
    "regression": ("encoder", "rows.csv", ["pearsonr", "spearmanr"], ["--label_column", "score"]),
    "token-classification": (
        "encoder",
        "words.jsonl",
        ["accuracy", "f1"],
        ["--text_columns", "tokens", "--label_column", "tags"],
    ),
    "masked-lm": ("masked", "text.txt", ["perplexity"], []),
    "causal-lm": ("decoder", "text.txt", ["perplexity"], []),
    "image-classification": ("vision", "images", ["accuracy"], []),
    "sentence-similarity": (
        "encoder",
        "rows.csv",
        ["spearmanr"],
        ["--text_columns", "text", "other", "--label_column", "score"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_reports_its_metrics_and_reloads(task, models, data, tmp_path):
    model, file, metrics, flags = TASKS[task]
    own = "sequence-classification" if task == "pairs" else task
    report = run(models / f"{model}-primal", data / file, tmp_path / "out", "--task", own, *flags)
    assert set(metrics) <= set(report["metrics"]) and report["metrics"]["loss"] > 0
    steps = [row for row in report["history"] if row["stage"] == "task"]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["loss"] == pytest.approx(row["loss_task"] + row["loss_ksvd"], rel=1e-5)
    auto = getattr(transformers, finetune.TASKS[own])
    loaded, info = auto.from_pretrained(tmp_path / "out", trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"] and loaded.config.primal_layers == [1, 2]
    assert (tmp_path / "out" / "README.md").is_file()
    before, after = weights(models / f"{model}-primal"), weights(tmp_path / "out")
    moved = [
        name for name, tensor in after.items() for old in before if name.endswith(old) and not tensor.equal(before[old])
    ]
    assert any(".primal." in name for name in moved) and any(".primal." not in name for name in moved)


@pytest.mark.parametrize("order", [(), ("--group_by_length",)])
def test_a_resumed_run_repeats_an_uninterrupted_one(order, models, data, tmp_path, monkeypatch):
    flags = ("--task", "masked-lm", "--max_steps", 6, "--eval_steps", 2, "--accumulation", 2, *order)
    whole = run(models / "masked-primal", data / "text.txt", tmp_path / "whole", *flags)
    evaluate, count = finetune.evaluate_model, []

    def stopping(*arguments):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(finetune, "evaluate_model", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(models / "masked-primal", data / "text.txt", tmp_path / "cut", *flags)
    assert not (tmp_path / "cut").exists()
    assert [path.name for path in (tmp_path / "cut-run").glob("checkpoint-*")] == ["checkpoint-0-2"]
    again = run(models / "masked-primal", data / "text.txt", tmp_path / "cut", *flags, "--resume")
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert again["metrics"] == whole["metrics"] and again["history"] == whole["history"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # in peft
@pytest.mark.parametrize("trains", ["primal", "primal+lora", "replaced-layers", "all"])
def test_all_stages_in_one_run_train_what_was_asked_for(trains, models, data, tmp_path):
    teacher = run(models / "encoder-teacher", data / "rows.csv", tmp_path / "teacher")
    assert "loss_ksvd" not in teacher["history"][0]
    flags = ("--stages", "match", "distill", "task", "--teacher", tmp_path / "teacher", "--trains", trains)
    flags += ("--match_steps", 2, "--distill_steps", 2, "--learning_rate", "1e-3")
    report = run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *flags)
    assert [row["stage"] for row in report["history"]][:5] == ["match", "match", "distill", "distill", "task"]
    before, after = weights(models / "encoder-primal"), weights(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    kept = [name for name in before if name not in moved and "shift" not in name and "coupling" not in name]
    blocks = [name for name in kept if ".primal." not in name]
    if trains == "primal":
        assert moved and all(".primal." in name for name in moved)
    if trains == "primal+lora":
        assert "encoder.layer.0.attention.self.query.weight" in moved and "embeddings.LayerNorm.weight" in kept
    if trains == "replaced-layers":
        assert moved and all("layer.1" in name or "layer.2" in name for name in moved)
    if trains == "all":
        assert not blocks


def test_batches_by_length_hold_every_row_once_in_an_order_of_the_seed_and_the_epoch():
    rows = [[0] * length for length in (3, 9, 1, 4, 7, 2, 8, 5, 6, 10) * 40]

    def order(seed, epoch):
        sampler = finetune.ByLength(4, rows, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    first = order(0, 0)
    assert sorted(first) == list(range(len(rows)))
    assert first == order(0, 0) and first != order(0, 1) and first != order(1, 0)
    padding = sum(4 * max(len(rows[i]) for i in first[at : at + 4]) for at in range(0, len(rows), 4))
    assert padding < 1.1 * sum(map(len, rows))


def test_two_processes_equal_one(models, data, tmp_path):
    flags = ["--max_steps", "2", "--max_length", "16", "--text_columns", "text", "--log_steps", "1"]
    usual = ["--model", str(models / "encoder-primal"), "--train", str(data / "rows.csv"), *flags]
    run(models / "encoder-primal", data / "rows.csv", tmp_path / "one", *flags, "--batch_size", 8)
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    call += [str(RECIPES / "finetune.py"), *usual, "--batch_size", "4", "--output", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    child = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads((tmp_path / "two" / "training_report.json").read_text())["processes"] == 2
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=1e-5)


OPTIONS = {
    "compiled": ["--compile", "eager"],
    "bf16": ["--mixed_precision", "bf16"],
    "checkpointed": ["--gradient_checkpointing"],
    "streamed": ["--streaming", "--num_labels", 3],
    "tracked": ["--trackers", "tensorboard"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_run_leave_its_losses_what_they_were(option, models, data, tmp_path):
    flags = ["--evaluation", data / "rows.csv", "--max_steps", 3]
    plain = run(models / "encoder-primal", data / "rows.csv", tmp_path / "plain", *flags)
    report = run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *flags, *OPTIONS[option])
    if option == "streamed":  # in another order
        assert len(report["history"]) == len(plain["history"]) and report["rows"]["train"] is None
        return
    for one, two in zip(plain["history"][:3], report["history"][:3], strict=True):
        tolerance = 0.05 if option == "bf16" else 1e-5
        assert two["loss"] == pytest.approx(one["loss"], rel=tolerance)
    if option == "tracked":
        assert list((tmp_path / "out-run" / "finetune").glob("events*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label_column", "nothing"], "has no column 'nothing'; it has label, score, text, other"),
        (["--num_labels", 2], "label 2 is out of range; train has the classes 0..1"),
        (["--trains", "primal", "--stages", "distill"], "stages match and distill need --teacher"),
        (["--batch_size", 0], "--batch_size must be >= 1, got 0"),
        (["--best_metric", "nothing"], "--best_metric nothing is not measured"),
        (["--group_by_length", "--streaming", "--max_steps", 2], "--group_by_length needs rows of one text"),
        (["--resume"], "has no checkpoint; start without it"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_no_folder(flags, message, models, data, tmp_path):
    with pytest.raises(ValueError) as caught:
        run(models / "encoder-primal", data / "rows.csv", tmp_path / "out", *flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_config_file_is_typed_and_flags_win(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: a\ntrain: b\noutput: c\nlearning_rate: 1e-4\nstages: [task]\npacking: false\nteacher: null\n"
    )
    config = read_config(["--config", str(file), "--seed", "3", "--learning_rate", "2e-4"])
    expected = FineTuneConfig("a", "b", "c", learning_rate=2e-4, packing=False, seed=3)
    assert config == expected
    file.write_text("model: a\nlearning_rat: 1\n")
    with pytest.raises(ValueError, match="has learning_rat; the keys are accumulation, batch_size"):
        read_config(["--config", str(file)])


CONFIGS = sorted((RECIPES / "configs").glob("*.yaml"))
SHIPPED = {  # the model, the data, and a metric that tells the task
    "distill": ("encoder", "table", "accuracy"),
    "images": ("vision", "images", "accuracy"),
    "masked_lm": ("masked", "lines", "perplexity"),
    "pairs": ("encoder", "table", "f1"),
    "regression": ("encoder", "table", "pearsonr"),
    "similarity": ("encoder", "table", "spearmanr"),
    "sst2": ("encoder", "table", "accuracy"),
    "sst2_lora": ("encoder", "table", "accuracy"),
    "tags": ("encoder", "table", "f1"),
    "wikitext": ("decoder", "lines", "perplexity"),
}


@pytest.fixture(scope="module")
def shipped_data(data, passages, tmp_path_factory):
    """A table with the columns that the data sets of the configs have, lines of text, and images."""
    folder = tmp_path_factory.mktemp("shipped")
    with open(folder / "table.jsonl", "w") as file:
        for place, text in enumerate(passages[:24]):
            texts = dict.fromkeys(("text", "premise", "sentence1"), text)
            texts |= dict.fromkeys(("hypothesis", "sentence2"), passages[-place])
            words = {"tokens": text.split()[:10], "tags": [place % 3] * 10}
            file.write(json.dumps({**texts, **words, "label": place % 3, "score": place % 5 / 5}) + "\n")
    (folder / "lines.txt").write_text("\n".join(passages * 2))
    return {"table": folder / "table.jsonl", "lines": folder / "lines.txt", "images": data / "images"}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # in peft
@pytest.mark.usefixtures("without_reload")
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_config_runs_by_the_command_in_its_head(file, models, shipped_data, tmp_path):
    (command,) = [line for line in file.read_text().splitlines() if "accelerate launch" in line]
    words = command.strip("# ").split()
    assert words[:5] == ["accelerate", "launch", "recipes/finetune.py", "--config", f"recipes/configs/{file.name}"]
    config = read_config(["--config", str(file), *words[5:]])
    kind, rows, metric = SHIPPED[file.stem]
    given = {"--train": shipped_data[rows], "--evaluation": shipped_data[rows], "--teacher": models / f"{kind}-teacher"}
    flags = [part for name in words if name in given for part in (name, given[name])]
    flags += ["--config", file, "--match_steps", 1, "--distill_steps", 1, "--max_length", min(config.max_length, 150)]
    report = run(models / f"{kind}-primal", shipped_data[rows], tmp_path / "out", *flags, "--max_steps", 1)
    assert [row["stage"] for row in report["history"]] == [*config.stages, "evaluation"]
    assert metric in report["metrics"] and report["config"]["learning_rate"] == config.learning_rate
