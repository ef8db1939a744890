"""Time and memory against length: the paper's efficiency comparison, one attention block, forward and backward.

    pip install -e ".[paper]"
    python recipes/paper/efficiency.py

The methods take turns at each length, each in a process of its own; see recipes/benchmarks/cells.py.
"""

import argparse
import json
import sys
from pathlib import Path

from results import save
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))
from attention_blocks import blocks  # noqa: E402
from cells import Cell, exponent, measure_apart  # noqa: E402

LENGTHS = (1024, 2048, 3072, 4096, 8192, 16384)
WIDTH, HEADS = 128, 2


def main() -> None:
    """All cells."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in LENGTHS:
        for name in tqdm(blocks(WIDTH, HEADS), desc=f"{tokens} tokens"):
            rows.setdefault(name, {})[str(tokens)] = measure_apart(Cell(name, tokens, WIDTH, HEADS))
    exponents = {name: {k: exponent(row, k) for k in ("forward_s", "training_s")} for name, row in rows.items()}
    shape = {"batch": 1, "width": WIDTH, "heads": HEADS, "dtype": "float32"}
    save({"rows": rows, "exponent": exponents, "shape": shape, "seed": 0})
    print(json.dumps(exponents, indent=2))


if __name__ == "__main__":
    main()
