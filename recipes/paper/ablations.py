"""What each part of the paper's layer is worth: accuracy without it, on scikit-learn's digits (65 tokens), three seeds.

    pip install -e ".[recipes]"
    python recipes/paper/ablations.py

From scratch, all layers or the last replaced: the paper's layer; without r in the output (its ablation, table 6);
without the KSVD loss; with weights that do not depend on the data. And after a conversion of the last two layers of a
trained softmax ViT: the SVD start against a random one, before and after fine-tuning.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from digits import SHAPE, TRAIN, accuracy, images, train, vit
from results import save
from transformers import ViTConfig, ViTForImageClassification

from hf_primal import PrimalAttention, PrimalSettings, convert_model

SIZE = 8
PAPER = {"rank": 20, "feature_map": "cosine", "weights": "sampled", "readout": "scores"}
LAYERS = {"Primal": [0, 1, 2, 3], "Primal.+": [3]}
FORMS: dict[str, tuple[dict[str, Any], float, bool]] = {  # changed settings, eta, whether r is read
    "the paper's": ({}, 0.05, True),
    "without r": ({}, 0.05, False),
    "without the KSVD loss": ({}, 0.0, True),
    "weights fixed, not sampled": ({"weights": "fixed"}, 0.05, True),
}


def primals(model: Any) -> list[PrimalAttention]:
    """The replaced layers."""
    return [module for module in model.modules() if isinstance(module, PrimalAttention)]


def without_r(model: Any) -> None:
    """Read e alone: the rows of W_o that meet r are zero and stay so."""
    for primal in primals(model):
        rank = primal.settings.rank
        with torch.no_grad():
            primal.out_map[:, rank:] = 0.0
        primal.out_map.register_hook(
            lambda gradient, rank=rank: gradient.index_fill(1, torch.arange(rank, 2 * rank), 0.0)
        )


def from_scratch(layers: list[int], form: str, epochs: int, seed: int, data: tuple[Any, Any], name: str) -> float:
    """Accuracy of one run."""
    changes, eta, reads_r = FORMS[form]
    torch.manual_seed(seed)
    model = vit(SIZE, layers, {**PAPER, **changes}, eta)
    if not reads_r:
        without_r(model)
    train(model, *data, epochs, 1e-3, name)
    return accuracy(model, *data)


def converted(epochs: int, seed: int, data: tuple[Any, Any]) -> dict[str, float]:
    """Accuracies of one softmax model and of two starts of its conversion, before and after the same fine-tuning."""
    torch.manual_seed(seed)
    teacher = ViTForImageClassification(ViTConfig(**SHAPE, image_size=SIZE))
    train(teacher, *data, epochs, 1e-3, f"softmax, seed {seed}")
    batches = [{"pixel_values": part} for part in data[0][:TRAIN].split(20)]
    fitted, _ = convert_model(
        teacher, layers="last2", calibration=batches, settings=PrimalSettings.paper(), refine_steps=0, seed=seed
    )
    random = copy.deepcopy(fitted)
    for primal in primals(random):
        primal.load_state_dict({name: value.clone() for name, value in primal.initial_values().items()})
    found = {"softmax teacher": accuracy(teacher, *data)}
    for name, model in (("SVD start", fitted), ("random start", random)):
        found[name] = accuracy(model, *data)
        train(model, *data, max(epochs // 10, 1), 3e-4, f"{name}, seed {seed}")
        found[f"{name}, fine-tuned {max(epochs // 10, 1)} epochs"] = accuracy(model, *data)
    return found


def repeated(run: Callable[[int], float | dict[str, float]], seeds: int) -> Any:
    """Mean and values over seeds, of a number or of every number of a dict."""
    runs: list[Any] = [run(seed) for seed in range(seeds)]
    if isinstance(runs[0], dict):
        return {name: summary([one[name] for one in runs]) for name in runs[0]}
    return summary(runs)


def summary(values: list[float]) -> dict[str, Any]:
    """Mean, standard deviation and values."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 4), "standard_deviation": round(spread, 4), "seeds": values}


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = images(SIZE)
    rows: dict[str, Any] = repeated(lambda seed: converted(options.epochs, seed, data), options.seeds)
    for model, layers in LAYERS.items():
        for form in FORMS:

            def run(seed: int, layers: list[int] = layers, form: str = form, model: str = model) -> float:
                return from_scratch(layers, form, options.epochs, seed, data, f"{model}, {form}, seed {seed}")

            rows[f"{model}, {form}"] = repeated(run, options.seeds)
            save({"accuracy": rows, "epochs": options.epochs})
    for name, row in rows.items():
        print(f"{name}: {row['mean']:.4f} ± {row['standard_deviation']:.4f}")


if __name__ == "__main__":
    main()
