"""Output matching: a few steps of AdamW on the replaced layers' outputs against the teacher's attention outputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from hf_primal.initialise import Progress
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.observe import Replay, States


def output_error(layer: Callable[..., Tensor], calls: list[States]) -> Tensor:
    """Squared error of a layer's output over valid tokens, relative to the teacher's power, a scalar."""
    errors, powers = [], []
    for states in calls:
        output = layer(**states.inputs()).transpose(1, 2)
        hidden = ~states.valid[:, None, :, None]
        errors.append((output - states.output).float().masked_fill(hidden, 0.0).square().sum())
        powers.append(states.output.float().masked_fill(hidden, 0.0).square().sum())
    return torch.stack(errors).sum() / torch.stack(powers).sum().clamp(min=1e-30)


class LogFactors(nn.Module):
    """A layer whose non-negative We and Wr are trained as logarithms, so that a step changes them by a ratio."""

    def __init__(self, primal: PrimalAttention) -> None:
        super().__init__()
        self.primal = primal
        self.logs = nn.ParameterDict()
        if primal.settings.nonnegative:
            for name in ("We", "Wr"):
                factor = primal.get_parameter(name).detach().abs()
                self.logs[name] = (factor + 1e-4 * factor.mean((-2, -1), keepdim=True)).log()

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Optimiser groups: logarithms move by `rate`, everything else by `rate` of its root mean square."""
        own = [(p, 1.0) for p in self.logs.values()]
        for name, parameter in self.primal.named_parameters():
            if name not in self.logs and name != "Lambda":
                own.append((parameter, float(parameter.detach().square().mean().sqrt().clamp(min=1e-3))))
        return [{"params": [parameter], "lr": rate * size} for parameter, size in own]

    def factors(self) -> dict[str, Tensor]:
        """We and Wr as the layer wants them; empty for signed factors."""
        return {name: log.exp() for name, log in self.logs.items()}

    def forward(self, **states: Any) -> Tensor:
        """As the layer."""
        return torch.func.functional_call(self.primal, self.factors(), kwargs=states)


def refine(
    primals: Mapping[int, PrimalAttention],
    replay: Replay,
    steps: int,
    generator: torch.Generator,
    rate: float = 0.1,
    progress: Progress | None = None,
) -> None:
    """Train all replaced layers at once on the teacher's inputs and outputs, in place.

    Args:
        primals: float32 layers by index.
        replay: the calibration data.
        steps: optimiser steps, one batch each, >= 0.
        generator: CPU generator for the order of the batches.
        rate: relative step size of AdamW at its peak, falling to 0 along a cosine.
        progress: called after each step with ("refine", step, steps, the mean relative error of its batch).

    Source: ours; output matching as in LoLCATs' attention transfer.
    """
    layers = {index: LogFactors(primal) for index, primal in primals.items()}
    groups = [group for layer in layers.values() for group in layer.groups(rate)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(replay), generator=generator).tolist()
        batch = replay[order.pop()]
        loss = torch.stack([output_error(layers[index], calls) for index, calls in batch.items()]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress:
            progress("refine", step + 1, steps, f"error {loss.item():.4f}")
    with torch.no_grad():
        for layer in layers.values():
            for name, factor in layer.factors().items():
                layer.primal.get_parameter(name).copy_(factor)
