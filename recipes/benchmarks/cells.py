"""One attention block at one length, timed in a process of its own, so that its peak of memory is its own.

The process keeps memory that it has freed, as it does inside a whole model, whose other layers take more at once.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from attention_blocks import blocks
from torch import Tensor, nn

KEPT = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"}  # of glibc; others ignore it
ENOUGH = 1.0  # seconds of repeats


@dataclass(frozen=True)
class Cell:
    """What is timed: a name of `attention_blocks.blocks`, and the shape of its input, batch 1."""

    name: str
    tokens: int
    width: int
    heads: int
    dtype: str = "float32"


def held_mib() -> float:
    """What this process holds now; `peak_mib` begins anew where the system allows it (Linux)."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def peak_mib() -> float:
    """The most that this process has held since `held_mib`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def training_pass(block: nn.Module, states: Tensor) -> None:
    """Forward and backward; a Primal layer's own loss is part of it."""
    loss = block.train()(states).square().mean()
    loss = loss + sum(module.loss for module in block.modules() if hasattr(module, "loss"))
    last = [module.last for module in block.modules() if getattr(module, "last", None) is not None]
    (loss + sum(J.square() for J in last)).backward()


def seconds(call: Callable[[], object], least: int = 3) -> float:
    """Median seconds of a call, the first one left out, repeated `least` times or more."""
    taken: list[float] = []
    while len(taken) <= least or sum(taken) < ENOUGH:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def measure(cell: Cell) -> dict[str, float]:
    """Median seconds of forward and of forward with backward, and MiB that the process grew by at the peak of each."""
    torch.manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    block = blocks(cell.width, cell.heads)[cell.name]().to(dtype)
    training_pass(block, torch.randn(1, 256, cell.width, dtype=dtype, requires_grad=True))  # warm-up of the libraries
    before = held_mib()
    states = torch.randn(1, cell.tokens, cell.width, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        block.eval()
        forward = seconds(lambda: block(states))
    forward_peak = peak_mib() - before
    training = seconds(lambda: training_pass(block, states))
    return {
        "forward_s": forward,
        "training_s": training,
        "forward_peak_mib": round(forward_peak, 1),
        "peak_mib": round(peak_mib() - before, 1),
    }


def in_process(script: str, work: Any) -> dict[str, Any]:
    """What a script prints for a dataclass of work, in a fresh process."""
    call = [sys.executable, script, json.dumps(asdict(work))]
    child = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **KEPT})
    return json.loads(child.stdout.splitlines()[-1])


def measure_apart(cell: Cell) -> dict[str, float]:
    """What `measure` finds in a fresh process."""
    return in_process(__file__, cell)


def exponent(rows: dict[str, dict[str, float]], key: str) -> float:
    """Exponent b in time = a * tokens ** b, least squares on logarithms from 2,048 tokens on."""
    points = [(math.log(int(n)), math.log(row[key])) for n, row in rows.items() if int(n) >= 2048 and key in row]
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 2)


if __name__ == "__main__":
    print(json.dumps(measure(Cell(**json.loads(sys.argv[1])))))
