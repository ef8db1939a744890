"""What was kept and what was gained: fidelity, spectra and latency as one dataclass, as JSON and as plots."""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_primal.observe import with_decoder_inputs

SCHEMA_VERSION = 1
LENGTHS = (128, 512, 2048)  # tokens at which latency is measured, where positions allow


@dataclasses.dataclass
class LayerReport:
    """One replaced layer. Errors are squared, relative to the teacher's attention output, over valid tokens."""

    index: int
    name: str
    heads: int
    head_dim: int
    spectrum: list[float]  # part of the observed attention's energy in each singular component, largest first
    energy: float  # the sum of the first `rank` of them, 0..1
    error_closed_form: float = math.nan
    error_refined: float | None = None
    sliding_window: int | None = None  # tokens, of a layer that attends within one


@dataclasses.dataclass
class Fidelity:
    """Teacher against converted model on held-out calibration data."""

    sequences: int
    tokens: int
    hidden_cosine: float  # of the last hidden states, mean over valid tokens
    logits_kl: float | None  # KL(teacher || converted) in nats, mean over positions; None without a head
    calibration_data: bool  # True when there was too little data to hold any out


@dataclasses.dataclass
class Latency:
    """One forward of one sequence, medians, in milliseconds."""

    tokens: int
    teacher_ms: float
    converted_ms: float

    @property
    def speedup(self) -> float:
        """Teacher's time over the converted model's."""
        return self.teacher_ms / self.converted_ms


@dataclasses.dataclass
class ConversionReport:
    """Everything `conversion_report.json` holds."""

    model: str
    converted_class: str
    layers: list[LayerReport]
    settings: dict[str, Any]
    calibration: dict[str, Any]
    fidelity: Fidelity
    parameters_teacher: int
    parameters_converted: int
    latency: list[Latency]
    break_even_tokens: int | None  # None: not reached at the lengths measured
    seconds: dict[str, float]
    seed: int
    device: str
    dtype: str
    versions: dict[str, str]
    command: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def measure_fidelity(
    teacher: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Sequence[Mapping[str, Tensor]],
    calibration_data: bool,
) -> Fidelity:
    """Compare the two models on batches that the calibration did not see.

    Args:
        teacher: in any mode; measured in eval mode.
        converted: likewise.
        batches: keyword arguments of forward, with `attention_mask` (B, N) where there is padding.
        calibration_data: the batches are the calibration data after all; stored in the result.
    """
    cosine, divergence, tokens, sequences, positions = 0.0, 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in batches:
            ours, theirs = (m.eval()(**batch, output_hidden_states=True) for m in (converted, teacher))
            hidden = [last_hidden_state(out).float() for out in (ours, theirs)]
            mask = output_mask(teacher, batch, hidden[0])
            cosine += float(torch.cosine_similarity(hidden[0], hidden[1], dim=-1)[mask].double().sum())
            tokens += int(mask.sum())
            sequences += len(mask)
            if getattr(ours, "logits", None) is not None:
                log_p, log_q = (out.logits.float().log_softmax(-1) for out in (theirs, ours))
                kl = (log_p.exp() * (log_p - log_q)).sum(-1)
                kl = kl[mask] if kl.shape == mask.shape else kl
                divergence += float(kl.double().sum())
                positions += kl.numel()
    return Fidelity(
        sequences, tokens, cosine / max(tokens, 1), divergence / positions if positions else None, calibration_data
    )


def last_hidden_state(output: Any) -> Tensor:
    """(B, N, hidden) of an output that has all hidden states; the decoder's of an encoder-decoder."""
    states = output.get("hidden_states")
    return (output.decoder_hidden_states if states is None else states)[-1]


def output_mask(model: PreTrainedModel, batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Which output positions are no padding, bool of the first two dimensions of `hidden`."""
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    to_frames: Any = getattr(model, "_get_feature_vector_attention_mask", None)  # of speech models
    if mask is not None and to_frames and mask.shape != hidden.shape[:2]:
        mask = to_frames(hidden.shape[1], mask)
    if mask is None or mask.shape != hidden.shape[:2]:
        mask = torch.ones(hidden.shape[:2], device=hidden.device)
    return mask.bool()


def position_limit(model: PreTrainedModel) -> int:
    """Longest sequence that the model has positions for; the longest of `LENGTHS` when it knows no limit."""
    known = (getattr(model.config, name, None) for name in ("max_position_embeddings", "n_positions"))
    limit = next((length for length in known if length), max(LENGTHS))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            taken = 0 if module.padding_idx is None else module.padding_idx + 1  # roberta counts from there
            limit = min(limit, module.num_embeddings - taken)
    return limit


def measure_latency(teacher: PreTrainedModel, converted: PreTrainedModel, rounds: int = 7) -> list[Latency]:
    """Time both models side by side on one sequence of random tokens at each of `LENGTHS` that positions allow.

    One warm-up each, then `rounds` alternating forwards; medians. Models without token inputs give no rows.
    """
    limit = position_limit(teacher)
    if teacher.main_input_name != "input_ids":
        return []
    rows = []
    for tokens in (n for n in LENGTHS if n <= limit):
        ids = torch.randint(5, teacher.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        ids = ids.to(teacher.device)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds + 1):
            for model, spent in zip((teacher, converted), times, strict=True):
                spent.append(_timed_forward(model, ids))
        rows.append(Latency(tokens, *(1e3 * statistics.median(spent[1:]) for spent in times)))
    return rows


def _timed_forward(model: PreTrainedModel, ids: Tensor) -> float:
    """Seconds of one forward, the device waited for."""
    accelerator = getattr(torch, ids.device.type, None)
    wait = getattr(accelerator, "synchronize", None)
    if wait:
        wait()
    begin = time.perf_counter()
    with torch.no_grad():
        model(**with_decoder_inputs(model, {"input_ids": ids}))
    if wait:
        wait()
    return time.perf_counter() - begin


def break_even(rows: Sequence[Latency]) -> int | None:
    """Tokens from which the converted model is the faster one, interpolated in log length; None if not reached.

    A model that is faster at every length measured breaks even at the shortest of them.
    """
    slow = [i for i, row in enumerate(rows) if row.speedup < 1.0]
    if not slow:
        return rows[0].tokens if rows else None
    if slow[-1] == len(rows) - 1:
        return None
    low, high = rows[slow[-1]], rows[slow[-1] + 1]
    part = (1.0 - low.speedup) / (high.speedup - low.speedup)
    return round(low.tokens * (high.tokens / low.tokens) ** part)


def write_plots(report: ConversionReport, folder: Path) -> list[str]:
    """Draw the spectra and the latency; names of the PNG files written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    names = []
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for layer in report.layers:
        kept = torch.tensor(layer.spectrum).cumsum(0).tolist()
        axis.plot(range(1, len(kept) + 1), kept, marker=".", label=f"layer {layer.index}")
    axis.axvline(
        report.settings["rank"], color="grey", linestyle="--", linewidth=1, label=f"rank {report.settings['rank']}"
    )
    axis.set(xlabel="components", ylabel="part of the energy kept", title="Observed attention", ylim=(0, 1.02))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    names.append("spectrum.png")
    figure.savefig(folder / names[-1], dpi=120, metadata={"Software": None})
    plt.close(figure)
    if report.latency:
        figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
        tokens = [row.tokens for row in report.latency]
        axis.plot(tokens, [row.teacher_ms for row in report.latency], marker="o", label="teacher")
        axis.plot(tokens, [row.converted_ms for row in report.latency], marker="o", label="converted")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xticks(tokens, [str(n) for n in tokens])
        axis.set(xlabel="tokens", ylabel="ms per sequence", title=f"Latency on {report.device}")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        names.append("latency.png")
        figure.savefig(folder / names[-1], dpi=120, metadata={"Software": None})
        plt.close(figure)
    return names
