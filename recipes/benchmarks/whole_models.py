"""A model with random weights and none, some or all of its layers replaced, timed in a process of its own."""

import gc
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from causal import decode_once
from cells import held_mib, in_process, peak_mib, seconds

import hf_primal
from hf_primal import PrimalSettings

SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # class, what its config's defaults lack, lengths
    "bert-base": ("BertForSequenceClassification", {"max_position_embeddings": 8192}, (128, 512, 2048, 8192)),
    "ModernBERT-base": ("ModernBertForSequenceClassification", {}, (512, 2048, 8192)),
    "ViT-B/16": ("ViTForImageClassification", {}, (197, 1025, 2305)),
    "Llama 160M": (
        "LlamaForCausalLM",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 8448,
        },
        (512, 2048, 8192),
    ),
}
REPLACED = ("none", "last4", "all", "all, folded, window 0")
FOLDABLE = ("bert-base", "ViT-B/16")
LEAST = 2  # repeats of what takes longer than all of them should
TRAINED = 2305  # tokens beyond which a training step is left out, to end in time


@dataclass(frozen=True)
class Run:
    """One model, which layers are replaced, and at how many tokens (batch 1)."""

    model: str
    replaced: str
    tokens: int


def build(run: Run) -> Any:
    """The model, random weights."""
    name, shape, _ = SHAPES[run.model]
    if run.model == "ViT-B/16":
        shape = shape | {"image_size": 16 * round((run.tokens - 1) ** 0.5)}
    base = name.split("For")[0]
    torch.manual_seed(0)
    if run.replaced == "none":
        return getattr(transformers, name)(getattr(transformers, f"{base}Config")(**shape)).eval()
    layers = getattr(transformers, f"{base}Config")(**shape).num_hidden_layers
    chosen = range(layers - 4, layers) if run.replaced == "last4" else range(layers)
    settings = asdict(PrimalSettings(window=0 if "window 0" in run.replaced else None))
    eta = settings.pop("ksvd_weight")
    config = getattr(hf_primal, f"Primal{base}Config")(
        **shape, primal_layers=list(chosen), primal=settings, ksvd_weight=eta
    )
    model = getattr(hf_primal, f"Primal{name}")(config).eval()
    if "folded" in run.replaced:
        model.fold()
    return model


def measure(run: Run) -> dict[str, Any]:
    """Tokens per second in inference, seconds of a training step, MiB at the peak of each; generation for decoders."""
    model = build(run)
    if run.model == "ViT-B/16":
        side = model.config.image_size
        inputs = {"pixel_values": torch.randn(1, 3, side, side), "labels": torch.zeros(1, dtype=torch.int64)}
    else:
        label = torch.zeros(1, dtype=torch.int64)
        ids = torch.randint(1, model.config.vocab_size, (1, run.tokens))
        inputs = {"input_ids": ids, "labels": ids if run.model.startswith("Llama") else label}
    given = {name: x for name, x in inputs.items() if name != "labels"}
    if run.model.startswith("Llama"):
        given |= {"logits_to_keep": 1, "use_cache": False}
    before = held_mib()
    with torch.no_grad():
        forward = seconds(lambda: model(**given), LEAST)
    found: dict[str, Any] = {
        "tokens_per_second": round(run.tokens / forward),
        "peak_mib": round(peak_mib() - before, 1),
        "parameters": sum(x.numel() for x in model.parameters()),
    }
    if run.model.startswith("Llama"):
        decode_once(model, given["input_ids"][:, :64], 2)
        _, decoding, held = decode_once(model, given["input_ids"], 32)
        found |= {"generated_per_second": round(32 / decoding, 1), "state_mib": round(held / 2**20, 1)}
        gc.collect()
    if run.tokens <= TRAINED and "folded" not in run.replaced:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        before = held_mib()  # weights, gradients and the optimizer's states
        found["training_step_s"] = round(seconds(step, LEAST), 3)
        found["training_peak_mib"] = round(peak_mib() - before, 1)
    return found


def measure_apart(run: Run) -> dict[str, Any]:
    """What `measure` finds in a fresh process."""
    return in_process(__file__, run)


if __name__ == "__main__":
    print(json.dumps(measure(Run(**json.loads(sys.argv[1])))))
