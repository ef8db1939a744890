"""The table of speed in README.md, from results/speed.json and results/fidelity.json.

python recipes/benchmarks/table.py
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SOFTMAX = "softmax SDPA"
FITTED = {  # rows of fidelity.json that are these blocks, in closed form
    "ours, default": "last4, window 16",
    "ours, folded": "last4, window 16",
    "ours, window 0": "last4, window 0",
    "ours, window 0, folded": "last4, window 0",
    "ours, preset paper": "last4, preset paper",
}
LENGTHS = ("512", "2048", "8192")  # columns of forward passes
TRAINED = "4096"  # tokens of the training columns


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def blocks_table() -> str:
    """Attention blocks: how many times as fast as SDPA, memory and exponent; fidelity with nothing trained."""
    found = json.loads((RESULTS / "speed.json").read_text())
    fitted = json.loads((RESULTS / "fidelity.json").read_text())
    kept = fitted["peers"] | {name: fitted["rows"][row]["svd, 0 steps"] for name, row in FITTED.items()}
    blocks, exponents = found["float32"], found["exponent"]["float32"]

    def times(name: str, tokens: str, key: str) -> str:
        return f"{blocks[SOFTMAX][tokens][key] / blocks[name][tokens][key]:.2f}x"

    head = ["", *(f"{int(n):,} tokens" for n in LENGTHS)]
    head += ["training, 4,096", "memory in it", "exponent", "cosine / long"]
    rows = []
    for name, row in blocks.items():
        fidelity = f"{kept[name]['cosine']:.3f} / {kept[name]['long_cosine']:.3f}" if name in kept else ""
        cells = [*(times(name, n, "forward_s") for n in LENGTHS), times(name, TRAINED, "training_s")]
        cells += [f"{row[TRAINED]['peak_mib']:,.0f} MiB", f"{exponents[name]['forward_s']:.2f}", fidelity]
        rows.append([name, *cells])
    return grid(head, rows)


if __name__ == "__main__":
    print(blocks_table())
