"""scikit-learn's digits, enlarged so that a small ViT sees as many tokens as DeiT: what some scripts here train on."""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForImageClassification, get_cosine_schedule_with_warmup

from hf_primal import PrimalViTConfig

TRAIN, BATCH = 1400, 50
SHAPE = {
    "patch_size": 1,
    "num_channels": 1,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_labels": 10,
}


def images(size: int) -> tuple[Tensor, Tensor]:
    """Pixels (1797, 1, size, size) in -1..1 and digits (1797,), shuffled once; the first 1,400 are to train on."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
    return F.interpolate(pixels, (size, size), mode="bilinear"), torch.tensor(digits.target)[order]


def vit(size: int, layers: list[int], primal: dict[str, Any], eta: float) -> Any:
    """A ViT from scratch with a token per pixel: 4 layers of 64, 2 heads, as `Primal<Base>` with its config.

    Args:
        size: pixels a side; there are size^2 + 1 tokens.
        layers: replaced ones; none is the softmax model.
        primal: fields of PrimalSettings.
        eta: weight of the KSVD loss.
    """
    config = PrimalViTConfig(**SHAPE, image_size=size, primal_layers=layers, primal=primal, ksvd_weight=eta)
    return AutoModelForImageClassification.from_config(config)


def train(model: Any, pixels: Tensor, labels: Tensor, epochs: int, rate: float, name: str) -> None:
    """AdamW, cosine schedule; batches of 50."""
    steps = epochs * (TRAIN // BATCH)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    for _ in trange(epochs, desc=name):
        for rows in torch.randperm(TRAIN).split(BATCH):
            model(pixel_values=pixels[rows], labels=labels[rows]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Any, pixels: Tensor, labels: Tensor) -> float:
    """On the 397 images that nothing is trained on."""
    guesses = [model(pixel_values=part).logits.argmax(-1) for part in pixels[TRAIN:].split(BATCH)]
    return round(float((torch.cat(guesses) == labels[TRAIN:]).float().mean()), 4)
