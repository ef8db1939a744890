"""The paper's figure of singular values: how much of an attention matrix its first components hold, layer by layer.

    pip install -e ".[demo,recipes]"
    python recipes/paper/spectrum.py

Two parts. A ViT of 197 tokens (as DeiT has) is trained here on scikit-learn's digits with softmax in every layer, with
the paper's Primal.+, and with Primal.+ but no KSVD loss. And MiniLM, itself and converted, on text it was not
calibrated on. Every curve is the mean over inputs and heads of cumulative singular values, their sum being 1.

The matrix of a softmax layer is its attention. That of the paper's layer is the kernel K of theorem 3.2 that its
features and f(X) make, and, beside it, what its scores say K is, E Lambda R^T. That of a converted layer is what it
weighs the values with.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from digits import accuracy, images, train, vit
from results import FOLDER, save
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_primal import PrimalAttention, PrimalSettings, convert_model
from hf_primal.convert.calibration import mixed_lengths, read_passages
from hf_primal.convert.cli import demo_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAYERS = 4
PAPER = {"rank": 20, "feature_map": "cosine", "weights": "sampled", "readout": "scores"}
MODELS: dict[str, tuple[list[int], float]] = {  # replaced layers and eta
    "softmax": ([], 0.0),
    "Primal.+": ([3], 0.05),
    "Primal.+, no KSVD loss": ([3], 0.0),
}


def cumulative(matrix: Tensor) -> Tensor:
    """Cumulative singular values of (..., N, M), their sum being 1, as a mean over all leading dimensions."""
    values = torch.linalg.svdvals(matrix.double())
    return (values.cumsum(-1) / values.sum(-1, keepdim=True)).flatten(0, -2).mean(0)


def kernels(primal: PrimalAttention, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The matrices that a layer stands for, (B, H, N, N) each, by name; inputs as for its forward."""
    if primal.settings.readout == "values":
        identity = torch.eye(q.shape[-2]).expand(*q.shape[:2], -1, -1)
        return {"weights of the values": primal.context_and_scores(q, k, identity)[0]}
    e, r = primal.context_and_scores(q, k, v)[1].chunk(2, -1)
    index, used = primal.sampled(v.shape[-2], None, v.device)
    rows = v.gather(2, index[:, None, :, None].expand(*v.shape[:2], -1, v.shape[-1])) * used[:, None, :, None]
    phi_q, phi_k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return {
        "K": (phi_q @ rows.mT) @ (phi_k @ rows.mT).mT,
        "E Lambda R^T": e * primal.Lambda[:, None].square() @ r.mT,  # the stored Lambda is its square root
    }


@torch.no_grad()
def spectra(model: Any, inputs: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Curve by layer and matrix."""
    model.set_attn_implementation("eager")  # the only one that gives attentions out
    seen: dict[int, list[Any]] = {}
    replaced = getattr(model.config, "primal_layers", None) or []
    layers = [module for module in model.modules() if isinstance(module, PrimalAttention)]
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, index=index: seen.setdefault(index, []).append(args[:3]))
        for index, layer in zip(replaced, layers, strict=True)
    ]
    found: dict[str, list[Tensor]] = {}
    kept = [index for index in range(model.config.num_hidden_layers) if index not in replaced]
    for batch in inputs:
        attentions = model(**batch, output_attentions=True).attentions
        for index, attention in zip(kept, (x for x in attentions or () if x is not None), strict=True):
            found.setdefault(f"{index} attention", []).append(cumulative(attention))
        for index, layer in zip(replaced, layers, strict=True):
            for name, matrix in kernels(layer, *seen[index].pop()).items():
                found.setdefault(f"{index} {name}", []).append(cumulative(matrix))
    for hook in hooks:
        hook.remove()
    curves: dict[str, dict[str, Tensor]] = {}
    for name, parts in found.items():
        layer_name, matrix_name = name.split(" ", 1)
        curves.setdefault(layer_name, {})[matrix_name] = torch.stack(parts).mean(0)
    return dict(sorted(curves.items(), key=lambda item: int(item[0])))


def digits_part(epochs: int, seed: int) -> dict[str, Any]:
    """Train the ViTs; spectra before and after, and accuracies."""
    pixels, labels = images(14)
    inputs = [{"pixel_values": part} for part in pixels[-64:].split(16)]
    found: dict[str, Any] = {}
    for name, (layers, eta) in MODELS.items():
        torch.manual_seed(seed)
        model = vit(14, layers, PAPER, eta)
        before = spectra(model.eval(), inputs)
        model.set_attn_implementation("sdpa")
        train(model, pixels, labels, epochs, 1e-3, name)
        score = accuracy(model, pixels, labels)
        found[name] = {"accuracy": score, "before training": before, "after training": spectra(model, inputs)}
    return found


def minilm_part(seed: int) -> dict[str, Any]:
    """MiniLM and conversions of its last four layers in closed form, on passages of 128 tokens held back."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    teacher = AutoModel.from_pretrained(demo_folder()).eval()
    passages = mixed_lengths(read_passages(None), 330, seed)
    tokens = torch.tensor(tokenizer(" ".join(passages[300:]), add_special_tokens=False, verbose=False)["input_ids"])
    inputs = [{"input_ids": part} for part in tokens[: len(tokens) // 128 * 128].view(-1, 128)[:16].split(4)]
    found = {}
    for window in (16, 0):
        settings = PrimalSettings(window=window)
        converted, _ = convert_model(
            teacher, tokenizer, layers="last4", calibration=passages[:300], settings=settings, refine_steps=0, seed=seed
        )
        found[f"converted, window {window}"] = spectra(converted, inputs)
    found = {"MiniLM itself": spectra(teacher, inputs), **found}
    return {name: {layer: curves[layer] for layer in ("2", "3", "4", "5")} for name, curves in found.items()}


def held(curves: Any) -> Any:
    """What the first 1, 5, 10 and 20 components hold, in the place of every curve."""
    if isinstance(curves, Tensor):
        return {str(n): round(float(curves[n - 1]), 4) for n in (1, 5, 10, 20)}
    return {name: held(value) for name, value in curves.items()} if isinstance(curves, dict) else curves


def plot(digits: dict[str, Any], minilm: dict[str, Any], path: Path) -> None:
    """Upper row: the ViTs by layer; lower row: MiniLM's last four layers."""
    figure, axes = plt.subplots(2, LAYERS, figsize=(14, 6.4), sharey=True, layout="constrained")
    colours = {"softmax": "C0", "Primal.+": "C3", "Primal.+, no KSVD loss": "C2"}
    for index, axis in enumerate(axes[0]):
        for name, run in digits.items():
            for stage, width in (("before training", 1.0), ("after training", 2.0)):
                for matrix, curve in run[stage][str(index)].items():
                    style = ":" if stage == "before training" else "--" if matrix == "E Lambda R^T" else "-"
                    label = f"{name}, {'before' if style == ':' else 'after'}"
                    label += "" if matrix == "attention" else f" ({matrix})"
                    if style != ":" or matrix != "E Lambda R^T":
                        axis.plot(range(1, 31), curve[:30], style, color=colours[name], lw=width, label=label)
        axis.set_title(f"ViT on digits, layer {index}")
    for position, axis in enumerate(axes[1]):
        layer = str(position + 2)
        for colour, (name, curves) in zip(("C0", "C1", "C3"), minilm.items(), strict=True):
            (curve,) = curves[layer].values()
            axis.plot(range(1, 31), curve[:30], color=colour, lw=2, label=name)
        axis.set_title(f"MiniLM, layer {layer}")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1.02)
        axis.legend(fontsize=7, loc="lower right")
    figure.supxlabel("first components")
    figure.supylabel("part of the sum of singular values")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Both parts, the plot and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    digits, minilm = digits_part(options.epochs, options.seed), minilm_part(options.seed)
    plot(digits, minilm, FOLDER / "spectrum.png")
    found = {"ViT on digits, 197 tokens": held(digits), "MiniLM, 128 tokens": held(minilm)}
    save({"first components hold": found, "epochs": options.epochs, "seed": options.seed})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
