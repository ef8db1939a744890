"""The closed form for all chosen layers: landmarks, factors, read-out, each in one pass over the calibration data."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_primal.factors import fit_factors
from hf_primal.landmarks import LandmarkSample, place_landmarks
from hf_primal.modeling.modeling_primal import head_shape
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.modeling.primal_settings import PrimalSettings
from hf_primal.moments import Moments, SlotMoments
from hf_primal.observe import Replay
from hf_primal.readout import Readout
from hf_primal.report import LayerReport

LANDMARK_TOKENS = 4096  # tokens per layer that k-means sees
PASSES = 3

Progress = Callable[[str, int, int, str], None]


def new_layers(
    chosen: Mapping[int, tuple[str, nn.Module]], replay: Replay, settings: PrimalSettings
) -> dict[int, PrimalAttention]:
    """Empty float32 layers of the shapes that the calibration data show, by index.

    Raises:
        ValueError: heads that the model's config does not describe, so that a reload could not rebuild them.
    """
    primals = {}
    for index, calls in replay[0].items():
        heads, head_dim = calls[0].query.shape[1], calls[0].query.shape[3]
        if (heads, head_dim) != head_shape(chosen[index][1], chosen[index][1].config):
            raise ValueError(f"layer {index} has {heads} heads of {head_dim}, which its config does not say")
        primals[index] = PrimalAttention(heads, head_dim, settings).to(calls[0].query.device)
    return primals


def gather(collectors: Mapping[int, Any], replay: Replay, tell: Progress | None = None, number: int = 1) -> None:
    """One pass: give every call of each layer to its collector; `number` is which of the `PASSES` it is."""
    with torch.no_grad():
        for done, batch in enumerate(replay):
            for index, calls in batch.items():
                for states in calls:
                    collectors[index].update(states)
            if tell:
                tell("observe", (number - 1) * len(replay) + done + 1, PASSES * len(replay), "")


def initialise_layers(
    chosen: Mapping[int, tuple[str, nn.Module]],
    replay: Replay,
    settings: PrimalSettings,
    generator: torch.Generator,
    tell: Progress | None = None,
) -> tuple[dict[int, PrimalAttention], dict[int, LayerReport]]:
    """Fit a layer for each chosen attention module.

    Args:
        chosen: name and attention module by layer index.
        replay: what they see.
        settings: of the layers.
        generator: CPU generator for the landmarks.
        tell: called with ("observe", done, total, "").

    Returns:
        Float32 layers and what to report of each, by index.

    Raises:
        ValueError: as `new_layers` and `fit_factors`.
    """
    primals, reports = new_layers(chosen, replay, settings), {}
    if settings.feature_map == "landmark":
        share = -(-LANDMARK_TOKENS // len(replay))
        samples = {index: LandmarkSample(primal, share, generator) for index, primal in primals.items()}
        gather(samples, replay, tell, 1)
        for index, primal in primals.items():
            place_landmarks(primal, samples[index])
    kind = SlotMoments if settings.weights == "sampled" else Moments
    moments = {index: kind(primal) for index, primal in primals.items()}
    gather(moments, replay, tell, 2)
    for index, primal in primals.items():
        spectrum = fit_factors(primal, moments[index])
        reports[index] = LayerReport(
            index=index,
            name=chosen[index][0],
            heads=primal.Lambda.shape[0],
            head_dim=primal.out_map.shape[-1],
            spectrum=spectrum.tolist(),
            energy=min(float(spectrum[: settings.rank].sum()), 1.0),
            sliding_window=moments[index].horizon,
        )
    for index, error in solve_readouts(primals, replay, tell).items():
        reports[index].error_closed_form = error
    return primals, reports


def solve_readouts(
    primals: Mapping[int, PrimalAttention], replay: Replay, tell: Progress | None = None
) -> dict[int, float]:
    """Write the best read-out for the layers' features into them; relative squared output errors by index."""
    readouts = {index: Readout(primal) for index, primal in primals.items()}
    gather(readouts, replay, tell, PASSES)
    return {index: readout.solve() for index, readout in readouts.items()}
