"""Time and memory against length: the paper's efficiency comparison, one attention block, forward and backward.

    pip install -e ".[paper]"
    python recipes/paper/efficiency.py

Every cell is a process of its own, so that its peak of memory is its own; the methods take turns at each length. The
process keeps memory that it has freed, as it does inside a whole model, whose other layers take more at once.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from results import save
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))
from attention_blocks import blocks  # noqa: E402

LENGTHS = (1024, 2048, 3072, 4096, 8192, 16384)
WIDTH, HEADS = 128, 2
KEPT = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"}  # of glibc; others ignore it


def measure(name: str, tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of forward and of forward with backward, and MiB that the process grew by at its peak."""
    torch.manual_seed(0)
    block, states = blocks(WIDTH, HEADS)[name](), torch.randn(1, 256, WIDTH)
    states.requires_grad_()  # as inside a model
    block(states).sum().backward()  # warm-up of the libraries, at a length that needs no memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    states, forward, both = torch.randn(1, tokens, WIDTH, requires_grad=True), [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        with torch.no_grad():
            block.eval()(states)
        between = time.perf_counter()
        output = block.train()(states)
        loss = output.square().mean() + sum(module.loss for module in block.modules() if hasattr(module, "loss"))
        last = [module.last for module in block.modules() if getattr(module, "last", None) is not None]
        (loss + sum(J.square() for J in last)).backward()
        forward.append(between - began)
        both.append(time.perf_counter() - between)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "forward_s": statistics.median(forward[1:]),
        "training_s": statistics.median(both[1:]),
        "peak_mib": round(grown, 1),
    }


def exponent(rows: dict[str, dict[str, float]], key: str) -> float:
    """Exponent b in time = a * tokens ** b, least squares on logarithms from 2,048 tokens on."""
    points = [(math.log(int(n)), math.log(row[key])) for n, row in rows.items() if int(n) >= 2048]
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 2)


def main() -> None:
    """All cells, or one in this process with --cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cell", nargs=2, metavar=("NAME", "TOKENS"))
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(options.cell[0], int(options.cell[1]), options.repeats)))
        return
    cells = [(name, tokens) for tokens in LENGTHS for name in blocks(WIDTH, HEADS)]
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, tokens in tqdm(cells):
        call = [sys.executable, __file__, "--repeats", str(options.repeats), "--cell", name, str(tokens)]
        child = subprocess.run(call, capture_output=True, text=True, check=True, env={**os.environ, **KEPT})
        rows.setdefault(name, {})[str(tokens)] = json.loads(child.stdout.splitlines()[-1])
    exponents = {name: {k: exponent(row, k) for k in ("forward_s", "training_s")} for name, row in rows.items()}
    shape = {"batch": 1, "width": WIDTH, "heads": HEADS, "dtype": "float32"}
    save({"rows": rows, "exponent": exponents, "shape": shape, "seed": 0})
    print(json.dumps(exponents, indent=2))


if __name__ == "__main__":
    main()
