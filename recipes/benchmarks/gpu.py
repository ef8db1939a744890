"""All checks and timings that need a GPU, in one go of a few minutes; writes results/gpu.json.

    pip install -e ".[paper]"
    python recipes/benchmarks/gpu.py

- agreement: the layer on the GPU against the same layer on the CPU in float32, outputs and gradients, float32 and
  bfloat16, with padding and without, causal, grouped keys. Exits with 1 where they differ by more than rounding.
- blocks: one attention block of 768 (12 heads) in bfloat16, 32,768 tokens in sequences of 512 to 32,768: forward,
  forward with backward, peak of memory, against SDPA and the other packages.
- decoding: tokens per second of a Llama shape after a long prompt.
"""

import argparse
import copy
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from attention_blocks import blocks, primal
from causal import decode_once
from cells import training_pass
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from tqdm import tqdm

import hf_primal
from hf_primal import PrimalAttention, PrimalSettings, __version__

RESULTS = Path(__file__).parent / "results" / "gpu.json"
FORMS = {
    "default": PrimalSettings(),
    "window 0": PrimalSettings(window=0),
    "preset paper": PrimalSettings.paper(rank=20),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padded": True},
    "causal": {"causal": True},
    "grouped keys": {"groups": 4},
    "causal, grouped keys, padded": {"causal": True, "groups": 4, "padded": True},
}
ALLOWED = {"float32": 1e-3, "bfloat16": 4e-2}  # of the largest entry; float32 matrix products may use TF32


def answer(layer: PrimalAttention, inputs: list[Tensor], valid: Tensor | None, causal: bool) -> list[Tensor]:
    """Output and gradients with respect to q, k, v and the parameters, in float32 on the CPU."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    layer.zero_grad()
    output = layer(*inputs, valid=valid, causal=causal)
    output.float().square().sum().backward()
    found = [output, *(x.grad for x in inputs), *(p.grad for p in layer.parameters() if p.grad is not None)]
    return [x.detach().float().cpu() for x in found if x is not None]


def agreement(device: str, tokens: int) -> dict[str, dict[str, float]]:
    """The largest difference from the CPU, relative to the largest entry, by form, case and dtype."""
    found: dict[str, dict[str, float]] = {}
    for form, settings in FORMS.items():
        for case, options in CASES.items():
            causal, groups = options.get("causal", False), options.get("groups", 12)
            if causal and settings.weights == "sampled":
                continue
            torch.manual_seed(0)
            layer = primal(12, 64, settings).eval()
            inputs = [torch.randn(2, heads, tokens, 64) for heads in (12, groups, groups)]
            valid = torch.arange(tokens) < torch.tensor([[tokens], [tokens // 2]]) if "padded" in options else None
            expected = answer(layer, inputs, valid, causal)
            for dtype in ALLOWED:
                there: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
                mask = None if valid is None else valid.to(device)
                moved = answer(copy.deepcopy(layer).to(**there), [x.to(**there) for x in inputs], mask, causal)
                worst = max(
                    float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
                    for a, b in zip(moved, expected, strict=True)
                )
                found.setdefault(f"{form}, {case}", {})[dtype] = round(worst, 6)
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """Median of a call; the device is waited for."""
    return 1e3 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.3).median


def block_row(block: nn.Module, tokens: int, total: int, device: str) -> dict[str, float]:
    """Milliseconds of forward and of forward with backward, MiB at the peak of the latter."""
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    block = block.to(**like)
    states = torch.randn(max(total // tokens, 1), tokens, 768, **like, requires_grad=True)
    with torch.no_grad():
        block.eval()
        block(states)
        forward = milliseconds(lambda: block(states))
    training_pass(block, states)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    training = milliseconds(lambda: training_pass(block, states))
    row = {"forward_ms": round(forward, 3), "training_ms": round(training, 3)}
    if device == "cuda":
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)
    return row


def time_blocks(device: str, lengths: list[int], total: int) -> dict[str, dict[str, Any]]:
    """All blocks at all lengths, ours compiled too; what does not fit, or does not run, says why."""
    made = {name: make for name, make in blocks(768, 12).items() if "no projections" not in name}
    made["ours, default, compiled"] = lambda: torch.compile(blocks(768, 12)["ours, default"](), dynamic=False)
    rows: dict[str, dict[str, Any]] = {}
    for tokens in tqdm(lengths):
        for name, make in made.items():
            if name == "softmax eager" and tokens > 8192:
                continue
            try:
                rows.setdefault(name, {})[str(tokens)] = block_row(make(), tokens, total, device)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                rows.setdefault(name, {})[str(tokens)] = {"error": str(error).splitlines()[0][:200]}
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def decoding(device: str, lengths: list[int]) -> dict[str, dict[str, Any]]:
    """Tokens per second and MiB of state after a prompt, none and all layers of a Llama shape replaced."""
    shape: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    shape |= {"num_attention_heads": 12, "max_position_embeddings": max(lengths) + 128}
    rows: dict[str, dict[str, Any]] = {}
    for name, layers in (("none replaced", []), ("all replaced", list(range(12)))):
        config = hf_primal.PrimalLlamaConfig(**shape, primal_layers=layers)
        model = hf_primal.PrimalLlamaForCausalLM(config).eval().to(device, torch.bfloat16)
        for tokens in lengths:
            ids = torch.randint(32000, (1, tokens), device=device)
            decode_once(model, ids, 4)
            prefill, seconds, held = decode_once(model, ids, 64)
            rows.setdefault(name, {})[str(tokens)] = {
                "prefill_tokens_per_second": round(tokens / prefill),
                "tokens_per_second": round(64 / seconds, 1),
                "state_mib": round(held / 2**20, 2),
            }
    return rows


def main() -> int:
    """Check, time, write; 1 where the GPU and the CPU disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", help="cpu, with few --tokens in short --lengths, tries the script itself"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: no CUDA device is to be seen; --device cpu tries the script itself", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"agreement": agreement(options.device, 300)}
    apart = {name: row for name, row in found["agreement"].items() if any(row[dtype] > ALLOWED[dtype] for dtype in row)}
    print(json.dumps(apart or {"agreement": "GPU and CPU agree"}, indent=2), flush=True)
    found["blocks"] = time_blocks(options.device, options.lengths, options.tokens)
    found["decoding"] = decoding(options.device, options.lengths[:-1] or options.lengths)
    found |= {
        "allowed": ALLOWED,
        "seed": 0,
        "command": "python recipes/benchmarks/gpu.py",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": {"hf_primal": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    if options.device == "cuda":
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
