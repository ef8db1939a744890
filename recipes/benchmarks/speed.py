"""Speed and memory against everything a user would pick instead; writes results/speed.json and speed.png.

    pip install -e ".[paper]"
    python recipes/benchmarks/speed.py

Parts, each alone with --parts:

- float32, bfloat16: one attention block of 768 (12 heads, batch 1, random weights, projections included) from 128 to
  16,384 tokens: forward, forward with backward, and the peak of memory of each.
- models: whole models with random weights, with none, the last 4 and all layers replaced.

Everything that is compared is measured in turns, each in a process of its own. Beside the times stand the operations
and bytes that a block cannot do without, and the part of that floor that is reached (floor.py). table.py makes the
table of README.md from the results.
"""

import argparse
import json
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import transformers
import whole_models
from attention_blocks import PEERS, blocks
from cells import Cell, exponent, measure_apart
from floor import HEADS, WIDTH, against_floor
from tqdm import tqdm

from hf_primal import __version__

RESULTS = Path(__file__).parent / "results" / "speed.json"
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384)
PARTS = ["float32", "bfloat16", "models"]
PLOTTED = {
    "softmax SDPA": "black",
    "ours, default": "tab:blue",
    "ours, window 0, folded": "tab:cyan",
    "sliding window 128": "tab:gray",
    **dict(zip(PEERS, ("tab:orange", "tab:green", "tab:red"), strict=True)),
}
TOO_LARGE = ("softmax eager", 16384)  # its N x N tensors take more than 24 GiB in training


def layer(dtype: str, lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """All blocks at some lengths: name to tokens to what was measured."""
    names = [name for name in blocks(WIDTH, HEADS) if "no projections" not in name]
    cells = [Cell(name, tokens, WIDTH, HEADS, dtype) for tokens in lengths for name in names]
    rows: dict[str, dict[str, Any]] = {}
    for cell in tqdm([cell for cell in cells if (cell.name, cell.tokens) != TOO_LARGE], desc=dtype):
        try:
            rows.setdefault(cell.name, {})[str(cell.tokens)] = measure_apart(cell)
        except subprocess.CalledProcessError:  # its traceback is on the screen
            if cell.name not in PEERS:
                raise
            rows.pop(cell.name, None)  # nystrom-attention mixes dtypes in bfloat16
    return rows


def models(found: dict[str, Any], again: bool) -> None:
    """All models that `found` does not have yet, or all of them again; on file after each, as they take long."""
    rows = found.setdefault("models", {})
    runs = [
        whole_models.Run(model, replaced, tokens)
        for model, (_, _, lengths) in whole_models.SHAPES.items()
        for tokens in lengths
        for replaced in whole_models.REPLACED
        if "folded" not in replaced or model in whole_models.FOLDABLE
    ]
    for run in tqdm(runs, desc="models"):
        row = rows.setdefault(run.model, {}).setdefault(str(run.tokens), {})
        if again or run.replaced not in row:
            row[run.replaced] = better(row.get(run.replaced, {}), whole_models.measure_apart(run))
            RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Forward and training time against length, both axes logarithmic."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axis, key, title in zip(axes, ("forward_s", "training_s"), ("forward", "forward and backward"), strict=True):
        for name, colour in PLOTTED.items():
            tokens = [int(n) for n in rows[name]]
            width = 2.2 if name.startswith(("ours", "softmax")) else 1.2
            milliseconds = [1000 * row[key] for row in rows[name].values()]
            axis.loglog(tokens, milliseconds, marker="o", markersize=3, color=colour, linewidth=width, label=name)
        axis.set_title(title)
        axis.set_xlabel("tokens")
        axis.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS], rotation=45, minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds, attention block of 768, 12 heads")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def better(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Of two runs, the lower median of each time (the higher of each rate); all else as in the second that has it."""
    merged = old | new
    for name, value in new.items():
        if isinstance(value, dict):
            merged[name] = better(old.get(name, {}), value)
        elif name in old and name.endswith("_s"):
            merged[name] = min(old[name], value)
        elif name in old and name.endswith("per_second"):
            merged[name] = max(old[name], value)
    return merged


def main() -> None:
    """Measure the parts, draw, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=LENGTHS, help="of the blocks")
    parser.add_argument(
        "--again",
        action="store_true",
        help="keep the better of each time on file and its new one: what else a shared machine does only adds to it",
    )
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found |= {
        "shape": {"batch": 1, "width": WIDTH, "heads": HEADS},
        "seed": 0,
        "command": shlex.join(["python", "recipes/benchmarks/speed.py"]),
        "device": f"cpu, {torch.get_num_threads()} threads",
        "machine": platform.machine(),
        "versions": {
            "hf_primal": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    for part in options.parts:
        if part == "models":
            models(found, options.again)
        else:
            found[part] = better(found.get(part, {}) if options.again else {}, layer(part, options.lengths))
        if options.again:
            found.setdefault("again", []).append({"part": part, "lengths": list(options.lengths)})
        if part != "models":
            exponents = {
                name: {key: exponent(row, key) for key in ("forward_s", "training_s")}
                for name, row in found[part].items()
            }
            found.setdefault("exponent", {})[part] = exponents
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    if "float32" in found:
        found["floor"] = against_floor(found["float32"])
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        draw(found["float32"], RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
