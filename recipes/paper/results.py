"""Where the numbers of these scripts go, with what it takes to get them again."""

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_primal import __version__

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
BEGAN = time.perf_counter()


def save(found: dict[str, Any], minutes: float | None = None) -> None:
    """Write results/SCRIPT.json for the script that runs.

    Args:
        found: its numbers.
        minutes: what they took, where it is not what this process took.
    """
    script, arguments = Path(sys.argv[0]), list(sys.argv[1:])
    if "--data-dir" in arguments:
        arguments[arguments.index("--data-dir") + 1] = "DIR"
    about = {
        "command": " ".join(["python", f"recipes/paper/{script.name}", *arguments]),
        "minutes": round((time.perf_counter() - BEGAN) / 60 if minutes is None else minutes, 1),
        "device": f"cpu, {torch.get_num_threads()} threads",
        "machine": platform.machine(),
        "versions": {"hf_primal": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{script.stem}.json").write_text(json.dumps(found | about, indent=2) + "\n")
