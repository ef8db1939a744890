"""Accuracy after fine-tuning: MiniLM itself against converted ones, the same recipe and steps, several seeds.

    python recipes/benchmarks/finetune.py --data-dir DIR

DIR holds sst2/{train,test}.csv and trec/{train,test}.csv with the columns label,text. Every run is the command
`accelerate launch recipes/finetune.py`; its last epoch is what counts, never the best on the test part.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from hf_primal import __version__
from hf_primal.convert.cli import demo_folder

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "finetune.json"
TASKS = {"sst2": ("1", "1e-4"), "trec": ("2", "1e-4")}  # epochs, learning rate
CONVERSIONS = {
    "last2": ["--layers", "last2"],
    "last4": ["--layers", "last4"],
    "last4 paper": ["--layers", "last4", "--preset", "paper"],
}
LORA = ["--trains", "primal+lora", "--learning_rate", "1e-3", "--primal_learning_rate", "1e-4"]
ROWS = {  # what is converted, and the flags of the recipe
    "teacher": (None, []),
    "last2": ("last2", []),
    "last4": ("last4", []),
    "last4, no KSVD loss": ("last4", ["--ksvd_weight", "0"]),
    "last2, LoRA": ("last2", LORA),
    "last4, LoRA": ("last4", LORA),
    "last4, preset paper": ("last4 paper", ["--ksvd_weight", "0.01"]),
}


def run(*command: str) -> None:
    """A command that must succeed."""
    child = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if child.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {child.stderr[-2000:]}")


def accuracy(model: str, folder: Path, task: str, seed: int, flags: list[str]) -> float:
    """Accuracy of one run on the test part after its last epoch."""
    epochs, rate = TASKS[task]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out"
        call = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(HERE.parent / "finetune.py")]
        call += ["--config", str(HERE.parent / "configs/sst2.yaml"), "--model", model, "--output", str(output)]
        call += ["--train", str(folder / task / "train.csv"), "--evaluation", str(folder / task / "test.csv")]
        run(*call, "--epochs", epochs, "--learning_rate", rate, "--seed", str(seed), *flags)
        history = json.loads((output / "training_report.json").read_text())["history"]
    return [row["accuracy"] for row in history if row["stage"] == "evaluation"][-1]


def known(task: str, name: str) -> list[float]:
    """What the result file has for a row, by seed."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results.get("accuracy", {}).get(task, {}).get(name, {}).get("seeds", [])


def note(task: str, name: str, value: float) -> None:
    """Add the next seed's accuracy to the result file."""
    values = [*known(task, name), value]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"accuracy": {}}
    results |= {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "command": shlex.join(["python", "recipes/benchmarks/finetune.py", "--data-dir", "DIR"]),
        "calibration": "300 sentences of the task's train part",
        "epochs and learning rate": TASKS,
        "device": "cpu",
        "machine": platform.machine(),
        "versions": {"hf_primal": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    row = {"mean": round(statistics.mean(values), 4), "standard_deviation": round(spread, 4), "seeds": values}
    results["accuracy"].setdefault(task, {})[name] = row
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    """Measure what is not in the result file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--again", action="store_true", help="measure again what the result file has")
    options = parser.parse_args()
    if options.again:
        RESULTS.unlink(missing_ok=True)
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as scratch:
            for seed, name in itertools.product(range(options.seeds), options.rows):
                if len(known(task, name)) > seed:
                    continue
                converted, flags = ROWS[name]
                model = Path(scratch) / str(converted) if converted else Path(demo_folder())
                if converted and not model.exists():
                    text = ["--calibration", str(options.data_dir / task / "train.csv"), "--text-column", "text"]
                    program = [sys.executable, "-m", "hf_primal.convert.cli"]
                    run(*program, demo_folder(), *CONVERSIONS[converted], *text, "--output", str(model), "--quiet")
                note(task, name, accuracy(str(model), options.data_dir, task, seed, flags))


if __name__ == "__main__":
    main()
