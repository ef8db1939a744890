"""What a conversion costs beside the teacher's own forward passes; writes results/conversion.json.

    python recipes/benchmarks/conversion.py

A BERT-base shape with random weights, batches of 16 sequences of 192 tokens, the last four layers. The closed form is
its three passes over the batches, k-means and solves included; one plain pass of the teacher over the same batches is
measured before and after it.
"""

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from cells import held_mib, peak_mib
from transformers import BertConfig, BertForMaskedLM

from hf_primal import PrimalSettings, __version__
from hf_primal.initialise import initialise_layers, solve_readouts
from hf_primal.layers import choose_layers
from hf_primal.observe import Replay
from hf_primal.refine import refine
from hf_primal.report import measure_latency
from hf_primal.surgery import build_converted

RESULTS = Path(__file__).parent / "results" / "conversion.json"
BATCH, TOKENS = 16, 192


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, and what it gives."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def convert(batches: int, steps: int, seed: int) -> dict[str, Any]:
    """Seconds of each stage, and MiB that it took at its peak beside the model."""
    torch.manual_seed(seed)
    teacher = BertForMaskedLM(BertConfig()).eval()
    inputs = [{"input_ids": torch.randint(1000, 30000, (BATCH, TOKENS))} for _ in range(batches)]
    for batch in inputs:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])

    def plain() -> None:
        with torch.no_grad():
            for batch in inputs:
                teacher(**batch)

    with torch.no_grad():
        teacher(**inputs[0])
    settings, chosen = PrimalSettings(), choose_layers(teacher, "last4")
    before, _ = timed(plain)
    held = held_mib()
    replay = Replay(teacher, {index: module for index, (_, module) in chosen.items()}, inputs, 2_000_000_000)
    generator = torch.Generator().manual_seed(seed)
    closed, (primals, _) = timed(lambda: initialise_layers(chosen, replay, settings, generator))
    after, _ = timed(plain)
    refinement, _ = timed(lambda: refine(primals, replay, steps, generator))
    readout, _ = timed(lambda: solve_readouts(primals, replay))
    rebuilt, converted = timed(lambda: build_converted(teacher, primals, settings))
    latency, _ = timed(lambda: measure_latency(teacher, converted))
    forward = (before + after) / 2
    return {
        "plain_forward_s": [round(before, 2), round(after, 2)],
        "closed_form_s": round(closed, 2),
        "closed_form_to_forward": round(closed / forward, 2),
        "refinement_s": round(refinement, 2),
        "last_readout_s": round(readout, 2),
        "rebuild_s": round(rebuilt, 2),
        "latency_table_s": round(latency, 2),
        "peak_mib": round(peak_mib() - held),
        "states_kept": f"{len(replay.kept)} of {batches} batches",
    }


def main() -> None:
    """Measure and write, or print where the time goes with --profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print what takes longest, write nothing")
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile()
        print(profile.runcall(convert, options.batches, options.steps, options.seed))
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    found = convert(options.batches, options.steps, options.seed)
    found |= {
        "shape": {"batches": options.batches, "batch": BATCH, "tokens": TOKENS, "model": "bert-base, random weights"},
        "refinement_steps": options.steps,
        "seed": options.seed,
        "command": "python recipes/benchmarks/conversion.py",
        "device": f"cpu, {torch.get_num_threads()} threads",
        "machine": platform.machine(),
        "versions": {"hf_primal": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
