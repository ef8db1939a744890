"""The table of recipes/paper/README.md, from the result files.

python recipes/paper/table.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """What results/NAME.json holds."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def spread(row: dict[str, Any], scale: float = 1.0) -> str:
    """Mean ± standard deviation over seeds."""
    mean = row.get("mean", row.get("mean_return"))
    return f"{scale * mean:.1f} ± {scale * row['standard_deviation']:.1f}"


def japanese_vowels() -> list[tuple[str, str, str]]:
    """Best over epochs, as the paper reports, mean and range of seeds, and the last epoch; percent."""
    lines = []
    for name, row in result("japanese_vowels")["rows"].items():
        best = [100 * run["best"] for run in row["runs"].values()]
        ours = f"{100 * row['best']:.1f} ({min(best):.1f} to {max(best):.1f}), last {100 * row['last']:.1f}"
        lines.append((f"JapaneseVowels, {name}", f"{100 * row['paper']:.1f}", ours))
    return lines


def listops() -> list[tuple[str, str, str]]:
    """Accuracy in percent; time and memory of training as a part of softmax's."""
    rows = result("listops")["rows"]
    paper = {"Primal.+": "1.7x, 5.24 GB of 5.50", "Primal": "3.4x, 0.69 GB of 5.50"}
    lines, base = [], rows["softmax"]
    for name, row in rows.items():
        ours = f"{100 * row['accuracy']:.1f} %"
        if name != "softmax":
            ratio = base["seconds_per_1000_steps"] / row["seconds_per_1000_steps"]
            ours += f", {ratio:.1f}x, {row['peak_mib']:,.0f} MB of {base['peak_mib']:,.0f}"
        published = f"{100 * row['paper']:.1f} %" + (f", {paper[name]}" if name in paper else "")
        lines.append((f"ListOps, {name}", published, ours))
    return lines


def efficiency() -> list[tuple[str, str, str]]:
    """Training step of one block against softmax's; the exponent of its time in the length."""
    found = result("efficiency")
    rows, published = found["rows"], {"2048": "3.4x, 7.9x", "4096": "7.4x, 15.5x"}
    lines = []
    for tokens in ("1024", "2048", "4096", "8192", "16384"):
        softmax, paper = (rows[name][tokens] for name in ("softmax eager", "ours, preset paper"))
        ratios = [f"{softmax[key] / paper[key]:.1f}x" for key in ("training_s", "peak_mib")]
        name = f"Training against softmax, {int(tokens):,} tokens: faster, less memory"
        lines.append((name, published.get(tokens, ""), ", ".join(ratios)))
    for name in ("softmax eager", "ours, preset paper", "ours, default"):
        expected = "2" if "softmax" in name else "1"
        lines.append((f"Exponent of time in length, {name}", expected, f"{found['exponent'][name]['training_s']:.2f}"))
    port, ours = (rows[f"{name}, no projections"]["4096"] for name in ("official Primal (port)", "ours, preset paper"))
    ratios = ", ".join(f"{port[key] / ours[key]:.2f}x" for key in ("training_s", "forward_s"))
    lines.append(("Preset paper against a port of the official module, 4,096 tokens: training, forward", "", ratios))
    return lines


def spectrum() -> list[tuple[str, str, str]]:
    """Part of the sum of singular values that the first 10 components hold, last layer."""
    runs = result("spectrum")["first components hold"]["ViT on digits, 197 tokens"]
    softmax, primal = (runs[name]["after training"]["3"] for name in ("softmax", "Primal.+"))
    minilm = result("spectrum")["first components hold"]["MiniLM, 128 tokens"]
    itself, converted = (
        minilm[name]["5"][kind]["10"]
        for name, kind in (("MiniLM itself", "attention"), ("converted, window 0", "weights of the values"))
    )
    return [
        (f"First {n} singular values, last layer, softmax against Primal.+", told, f"{a:.3f}, {b:.3f}")
        for n, told, a, b in (
            ("5", "", softmax["attention"]["5"], primal["K"]["5"]),
            ("10", "about 0.9, 1.0", softmax["attention"]["10"], primal["K"]["10"]),
        )
    ] + [("First 10, last layer of MiniLM, itself against converted (window 0)", "", f"{itself:.3f}, {converted:.3f}")]


def language_model() -> list[tuple[str, str, str]]:
    """Perplexity, and speed of training against softmax."""
    rows = result("language_model")["rows"]
    base = rows["softmax"]["seconds_per_1000_steps"]
    return [
        (
            f"Language modelling, perplexity, {name}",
            "" if row["paper"] is None else f"{row['paper']:.1f}",
            f"{row['perplexity']:.1f} ({base / row['seconds_per_1000_steps']:.2f}x)",
        )
        for name, row in rows.items()
    ]


def decision_transformer() -> list[tuple[str, str, str]]:
    """Mean return of 20 episodes."""
    published = {"DT": "72.2 ± 2.6", "Primal.+DT": "77.5 ± 6.0"}
    rows = result("decision_transformer")["rows"]
    return [(f"Decision transformer, {name}", published[name], spread(row)) for name, row in rows.items()]


def ablations() -> list[tuple[str, str, str]]:
    """Accuracy in percent."""
    published = {
        "Primal, the paper's": "57.5",
        "Primal, without r": "45.6",
        "Primal.+, the paper's": "60.4",
        "Primal.+, without r": "59.4",
    }
    rows = result("ablations")["accuracy"]
    return [(f"Ablation: {name}", published.get(name, ""), spread(row, 100)) for name, row in rows.items()]


PARTS = (japanese_vowels, listops, efficiency, spectrum, language_model, decision_transformer, ablations)
DIFFERENT = {
    "japanese_vowels": "three seeds (the paper has one); best epoch on the test part, as there",
    "listops": "100 to 500 tokens, 20,000 rows, 600 steps; on a CPU",
    "efficiency": "one block of 128, batch 1, on a CPU; the paper's are whole models on a GPU",
    "spectrum": "digits in the place of ImageNet, 4 layers in the place of 12",
    "language_model": "WikiText-2 validation in the place of WikiText-103; 4 layers of 128",
    "decision_transformer": "CartPole without speeds in the place of D4RL",
    "ablations": "digits (65 tokens) in the place of the Long Range Arena; two seeds",
}


def table() -> str:
    """All parts that have been run, in Markdown."""
    lines = ["| | paper | ours | what differs | command | minutes |", "|---|---|---|---|---|---|"]
    for part in PARTS:
        name = part.__name__
        if not (FOLDER / f"{name}.json").exists():
            continue
        about = [DIFFERENT[name], f"`{result(name)['command']}`", f"{result(name)['minutes']:.0f}"]
        for row in part():
            lines.append(f"| {' | '.join([*row, *about])} |")
            about = ["", "", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
