"""How much of MiniLM is left after conversion, by start and by refinement steps; writes results/fidelity.json.

    python recipes/benchmarks/fidelity.py --data-dir DIR

DIR holds wikitext2/{valid,test}.txt and sts14/test.csv. Needs the extra [dev]. Calibration: 300 passages of
WikiText-2 valid, half paragraphs, half sentences, at most 192 tokens. Measured: Spearman with the human scores of
STS-14, cosine of its sentence embeddings with the teacher's, and cosine on documents of about 400 tokens.
"""

import argparse
import copy
import csv
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_blocks import PEERS, peer_between_projections
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.modeling_utils import AttentionInterface

from hf_primal import PrimalSettings, __version__
from hf_primal.convert.calibration import mixed_lengths
from hf_primal.convert.cli import demo_folder
from hf_primal.convert.pipeline import split_batches, text_lengths
from hf_primal.initialise import initialise_layers, solve_readouts
from hf_primal.layers import choose_layers
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.observe import Replay
from hf_primal.refine import refine
from hf_primal.surgery import build_converted

RESULTS = Path(__file__).parent / "results" / "fidelity.json"
STEPS = {"svd": (0, 50, 200), "random": (0, 50, 200), "band alone": (0,)}
ROWS = {
    "last2, window 16": ("last2", PrimalSettings()),
    "last4, window 16": ("last4", PrimalSettings()),
    "last4, window 0": ("last4", PrimalSettings(window=0)),
    "last4, window 16, far field removed": ("last4", PrimalSettings()),
    "last4, preset paper": ("last4", PrimalSettings.paper()),
}
OTHERS = ("sliding window 16", "sliding window 128", *PEERS)


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of a WikiText file, headings and scraps left out."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if len(line) > 200 and not line.startswith("=")]


class Judge:
    """Embeds the evaluation texts with mean pooling, and compares with the teacher's embeddings."""

    def __init__(self, data: Path, tokenizer: Any, teacher: Any) -> None:
        self.tokenizer = tokenizer
        rows = list(csv.DictReader((data / "sts14/test.csv").open(encoding="utf-8")))
        self.texts = [row["sentence1"] for row in rows] + [row["sentence2"] for row in rows]
        self.scores = [float(row["score"]) for row in rows]
        self.documents, document = [], ""
        for paragraph in paragraphs(data / "wikitext2/test.txt"):
            document = f"{document} {paragraph}"
            if len(tokenizer(document, truncation=True)["input_ids"]) >= 400:
                self.documents.append(document)
                document = ""
        self.teacher = self.embed(teacher, self.texts), self.embed(teacher, self.documents)

    def embed(self, model: Any, texts: list[str]) -> Tensor:
        """Unit sentence embeddings, (len(texts), hidden)."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        rows: list[Any] = [None] * len(texts)
        for start in range(0, len(order), 64):
            chosen = order[start : start + 64]
            batch = self.tokenizer(
                [texts[i] for i in chosen], truncation=True, max_length=402, padding=True, return_tensors="pt"
            )
            with torch.no_grad():
                hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
            for i, row in zip(chosen, pooled, strict=True):
                rows[i] = row
        return torch.stack(rows)

    def spearman(self, embedded: Tensor) -> float:
        """With the human scores."""
        first, second = embedded.chunk(2)
        return float(spearmanr((first * second).sum(-1), self.scores)[0])

    def __call__(self, model: Any) -> dict[str, float]:
        """Of a converted model."""
        short, long = self.embed(model, self.texts), self.embed(model, self.documents)
        return {
            "sts_spearman": round(self.spearman(short), 4),
            "sts_of_teacher": round(self.spearman(short) / self.spearman(self.teacher[0]), 4),
            "cosine": round(float((short * self.teacher[0]).sum(-1).mean()), 4),
            "long_cosine": round(float((long * self.teacher[1]).sum(-1).mean()), 4),
        }


def start_values(start: str, primals: dict[int, PrimalAttention], replay: Replay) -> None:
    """Turn fitted layers into a random start, or remove their far field and solve the read-out again."""
    with torch.no_grad():
        for primal in primals.values():
            if start == "random":
                for name, value in primal.initial_values().items():
                    primal.state_dict()[name].copy_(value)
            elif start == "band alone":
                primal.We.zero_()
    if start == "band alone":
        solve_readouts(primals, replay)


def measure_row(
    name: str, teacher: Any, tokenizer: Any, passages: list[str], judge: Judge, seed: int
) -> dict[str, Any]:
    """All starts and step counts of one row of the table."""
    layers, settings = ROWS[name]
    chosen = choose_layers(teacher, layers)
    batches, _ = split_batches(passages, tokenizer, text_lengths(teacher, tokenizer, 192), 16, seed)
    replay = Replay(teacher, {index: module for index, (_, module) in chosen.items()}, batches, 2_000_000_000)
    row: dict[str, Any] = {"layers": layers, "settings": asdict(settings)}
    begin = time.perf_counter()
    fitted, _ = initialise_layers(chosen, replay, settings, torch.Generator().manual_seed(seed))
    row["closed_form_seconds"] = round(time.perf_counter() - begin, 1)
    saved = {index: {k: v.clone() for k, v in primal.state_dict().items()} for index, primal in fitted.items()}
    starts = ("band alone",) if "removed" in name else ("svd", "random")
    for start in starts:
        for steps in STEPS[start]:
            torch.manual_seed(seed)
            for index, primal in fitted.items():
                primal.load_state_dict(saved[index])
            start_values(start, fitted, replay)
            if steps:
                begin = time.perf_counter()
                refine(fitted, replay, steps, torch.Generator().manual_seed(seed))
                errors = solve_readouts(fitted, replay)
                seconds = time.perf_counter() - begin
            result = judge(build_converted(teacher, fitted, settings))
            if steps:
                result["output_error"] = round(sum(errors.values()) / len(errors), 4)
                result["refine_seconds"] = round(seconds, 1)
            row[f"{start}, {steps} steps"] = result
            print(f"{name} | {start}, {steps} steps | {result}", flush=True)
    return row


def peer_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """A peer in the attention interface, sequence by sequence, so that none meets padding."""
    output = query.new_zeros(query.transpose(1, 2).shape)
    for i in range(len(query)):
        tokens = slice(None) if attention_mask is None else attention_mask[i, 0, 0].nonzero().squeeze(-1)
        output[i, tokens] = module.peer(*(x[i : i + 1, :, tokens] for x in (query, key, value)))[0]
    return output, None


def measure_peer(name: str, teacher: Any, judge: Judge, seed: int) -> dict[str, float]:
    """Another package's attention in the last four layers, between the teacher's own projections, nothing fitted."""
    torch.manual_seed(seed)
    AttentionInterface.register("peer", peer_attention)
    model = copy.deepcopy(teacher)
    for _, module in choose_layers(model, "last4").values():
        module.peer = peer_between_projections(name, module.num_attention_heads, module.attention_head_size)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = "peer"
    return judge(model)


def peak_memory(samples: int, data: Path) -> float:
    """Peak resident megabytes (Linux) of a closed-form conversion that keeps 0.1 GB of states, in its own process."""
    script = (
        "import sys; from hf_primal.convert.cli import main; main(sys.argv[1:]); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    with tempfile.TemporaryDirectory() as folder:
        options = ["--demo", "--calibration", str(data / "wikitext2/valid.txt"), "--samples", str(samples)]
        options += ["--memory", "0.1", "--refine-steps", "0", "--quiet", "--output", f"{folder}/converted"]
        call = [sys.executable, "-c", script, *options]
        return round(int(subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024)


def main() -> None:
    """Measure every row and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=[], choices=list(ROWS), help="measure these rows alone")
    parser.add_argument("--peers", action="store_true", help="measure other packages' attention alone (extra [paper])")
    parser.add_argument("--peak-memory", action="store_true", help="measure it, with --rows too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    teacher = AutoModel.from_pretrained(demo_folder()).eval()
    passages = mixed_lengths(paragraphs(options.data_dir / "wikitext2/valid.txt"), 300, options.seed)
    judge = Judge(options.data_dir, tokenizer, teacher)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    results |= {
        "teacher_sts_spearman": round(judge.spearman(judge.teacher[0]), 4),
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "calibration": "300 passages of WikiText-2 valid, half paragraphs, half sentences, cut to 192 tokens, of which "
        "30 are held out; seen one by one and joined to 384 tokens",
        "documents": len(judge.documents),
        "command": shlex.join(["python", "recipes/benchmarks/fidelity.py", "--data-dir", "DIR"]),
        "seed": options.seed,
        "threads": options.threads,
        "device": "cpu",
        "machine": platform.machine(),
        "versions": {"hf_primal": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if options.peers:
        results["peers"] = {name: measure_peer(name, teacher, judge, options.seed) for name in OTHERS}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        return
    for name in options.rows or ROWS:
        results["rows"][name] = measure_row(name, teacher, tokenizer, passages, judge, options.seed)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    if options.peak_memory or not options.rows:
        results["peak_megabytes_by_samples"] = {str(n): peak_memory(n, options.data_dir) for n in (150, 600, 1200)}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
