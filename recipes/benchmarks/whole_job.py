"""The whole job as a user does it, timed command by command; writes results/whole_job.json.

    python recipes/benchmarks/whole_job.py --data-dir DIR

DIR holds sst2/{train,validation}.csv with the columns label,text. The hub that the model is pushed to and loaded from
is the one of the tests, on this machine. Needs the extras [demo], [recipes] and a clone.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hf_primal import __version__
from hf_primal.convert.cli import demo_folder

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "whole_job.json"
COMMANDS = {
    "convert": "primal-convert {model} --layers last2 --calibration {data}/train.csv --text-column text "
    "--output primal",
    "fine-tune and evaluate": "accelerate launch --cpu {root}/recipes/finetune.py "
    "--config {root}/recipes/configs/sst2.yaml --model primal --train {data}/train.csv "
    "--evaluation {data}/validation.csv --epochs 1 --output classifier",
    "push": "primal-convert push classifier user/classifier",
    "load and classify": "python -c LOAD",
}
LOAD = """
from transformers import pipeline
classify = pipeline("text-classification", "user/classifier", trust_remote_code=True)
print(classify(["a gripping , beautifully acted film", "a dull , lifeless mess"]))
"""


def main() -> None:
    """Run the commands one after the other in an empty folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    data = parser.parse_args().data_dir.absolute() / "sst2"
    sys.path.insert(0, str(ROOT / "tests"))
    from hub_server import TOKEN, environment, serving

    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    seconds, shown = {}, {}
    with tempfile.TemporaryDirectory() as scratch, serving() as hub:
        env = {**environment(Path(scratch) / "home", hub.url, TOKEN), "PATH": programs}
        for name, command in COMMANDS.items():
            words = [word.format(model=demo_folder(), data=data, root=ROOT) for word in command.split()]
            words = [LOAD if word == "LOAD" else word for word in words]
            began = time.perf_counter()
            child = subprocess.run(words, cwd=scratch, env=env, capture_output=True, text=True)
            seconds[name] = round(time.perf_counter() - began, 1)
            if child.returncode:
                raise RuntimeError(f"{name}: {child.stderr[-2000:]}")
            shown[name] = child.stdout.strip().splitlines()[-1]
        report = json.loads((Path(scratch) / "classifier" / "training_report.json").read_text())
    short = {"model": "MODEL", "data": "DIR", "root": "."}
    results = {
        "command": "python recipes/benchmarks/whole_job.py --data-dir DIR",
        "commands": {name: command.format(**short) for name, command in COMMANDS.items()},
        "seconds": seconds,
        "accuracy on validation": report["metrics"]["accuracy"],
        "last line of the output": shown["load and classify"],
        "seed": report["config"]["seed"],
        "device": f"cpu, {os.cpu_count()} cores",
        "machine": platform.machine(),
        "versions": {**report["versions"], "hf_primal": __version__, "torch": torch.__version__},
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
