"""`convert_model`: calibrate, fit, refine, rebuild and measure, from a model in memory to a model in memory."""

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_primal.convert.calibration import joined, mixed_lengths, read_passages, tokenise
from hf_primal.initialise import Progress, initialise_layers, solve_readouts
from hf_primal.layers import choose_layers
from hf_primal.modeling.modeling_primal import head_shape
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.modeling.primal_settings import PrimalSettings
from hf_primal.observe import Replay, with_decoder_inputs
from hf_primal.refine import refine
from hf_primal.report import ConversionReport, break_even, measure_fidelity, measure_latency, position_limit
from hf_primal.surgery import build_converted, primal_class


def convert_model(
    model: PreTrainedModel,
    processor: Any = None,
    *,
    layers: str = "last4",
    calibration: Sequence[str] | Sequence[Mapping[str, Tensor]] | None = None,
    settings: PrimalSettings | None = None,
    refine_steps: int = 200,
    max_length: int = 192,
    batch_size: int = 16,
    memory_gb: float = 2.0,
    fold: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, ConversionReport]:
    """Replace the softmax attention of the chosen layers by Primal-Attention.

    Args:
        model: a Transformers model whose attention goes through the attention interface; left as it was found.
        processor: its tokenizer; needed for texts, and for the built-in text.
        layers: "last4", "8-11", "0,3" or "all", counted over the self-attention modules in depth order.
        calibration: texts, or batches of the model's keyword arguments with `attention_mask` (B, N) where there is
            padding; None for 300 passages of the text inside Python. A tenth is held out for the report. Texts are
            seen one by one, and once more joined to twice `max_length`, for attention at a distance.
        settings: the layer to build; None for the default (landmarks, values read-out, window 16).
        refine_steps: steps of output matching against the teacher after the closed form, >= 0.
        max_length: tokens that texts are cut to, >= 1.
        batch_size: texts a batch, >= 1.
        memory_gb: gigabytes of observed states kept; what does not fit is computed again, up to one more forward of
            the teacher per pass and refinement step.
        fold: give back the folded model, which is faster; see its method `fold`.
        seed: of the landmarks and of the order of batches.
        progress: called with (stage, done, total, detail).

    Returns:
        The converted model, `Primal<Base>` in eval mode with every tensor outside the replaced layers equal to the
        model's, in its dtype and on its device; and the report.

    Raises:
        ValueError: layers that do not exist, attention that cannot be replaced, empty calibration data, settings
            that do not fit the heads, a model that cannot be folded.
    """
    tell = progress or (lambda stage, done, total, detail: None)
    settings = settings or PrimalSettings()
    primal_class(model)
    chosen = choose_layers(model, layers)
    for _, module in chosen.values():  # settings that do not fit the heads fail before any work
        with torch.device("meta"):
            PrimalAttention(*head_shape(module, module.config), settings)
    if calibration is None:
        calibration = mixed_lengths(read_passages(None), 300, seed)
    lengths = text_lengths(model, processor, max_length)
    parts = split_batches(calibration, processor, lengths, batch_size, seed)
    batches, held_out = ([placed(model, batch) for batch in part] for part in parts)

    modules = {index: module for index, (_, module) in chosen.items()}
    replay = Replay(model, modules, batches, int(memory_gb * 1e9))
    generator = torch.Generator().manual_seed(seed)
    begin = time.perf_counter()
    primals, reports = initialise_layers(chosen, replay, settings, generator, progress)
    seconds = {"closed_form": time.perf_counter() - begin}
    if refine_steps:
        begin = time.perf_counter()
        refine(primals, replay, refine_steps, generator, progress=progress)
        for index, error in solve_readouts(primals, replay).items():
            reports[index].error_refined = error
        seconds["refinement"] = time.perf_counter() - begin
    tell("measure", 0, 1, "")
    converted: Any = build_converted(model, primals, settings)
    if fold:
        converted.fold()
    rows = measure_latency(model, converted)
    report = ConversionReport(
        model=model.config._name_or_path or type(model).__name__,
        converted_class=type(converted).__name__,
        layers=[reports[index] for index in sorted(reports)],
        settings=dataclasses.asdict(settings),
        calibration={
            "batches": len(batches),
            "tokens": count_tokens(batches),
            "max_length": lengths[0],
            "joined_length": lengths[1],
            "refine_steps": refine_steps,
        },
        fidelity=measure_fidelity(model, converted, held_out or batches, calibration_data=not held_out),
        parameters_teacher=model.num_parameters(),
        parameters_converted=converted.num_parameters(),
        latency=rows,
        break_even_tokens=break_even(rows),
        seconds={name: round(value, 2) for name, value in seconds.items()},
        seed=seed,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        versions=dict(converted.config.primal_versions),
    )
    tell("measure", 1, 1, "")
    sliding = {layer.index: layer.sliding_window for layer in report.layers if layer.sliding_window}
    if sliding:
        report.notes.append(
            f"layers {', '.join(map(str, sliding))} attend within a sliding window of {max(sliding.values())} tokens, "
            "and still do; being linear in time already, they gain no speed"
        )
    return converted, report


def placed(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch that is complete, on the model's device, with floating-point inputs (pixels, sound) in its dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in with_decoder_inputs(model, batch).items()
    }


def count_tokens(batches: Sequence[Mapping[str, Tensor]]) -> int | None:
    """Valid tokens of batches of token ids; None for other inputs."""
    if not all("input_ids" in batch for batch in batches):
        return None
    return sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)


def text_lengths(model: PreTrainedModel, processor: Any, max_length: int) -> tuple[int, int]:
    """Tokens that passages are cut to, and tokens that joined ones are: twice as many, where positions allow."""
    limit = min(position_limit(model), getattr(processor, "model_max_length", max_length))
    return min(max_length, limit), min(2 * max_length, limit)


def split_batches(
    calibration: Sequence[str] | Sequence[Mapping[str, Tensor]],
    processor: Any,
    lengths: tuple[int, int],
    batch_size: int,
    seed: int,
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Calibration batches and, a tenth of the data, held-out batches (none when there is a single item).

    Raises:
        ValueError: nothing to calibrate on, or texts without a tokenizer.
    """
    items: list[Any] = [item for item in calibration if not isinstance(item, str) or item.strip()]
    if not items:
        raise ValueError("calibration is empty; give at least one text or batch")
    random.Random(seed).shuffle(items)
    held = min(max(len(items) // 10, 1), len(items) - 1)
    if isinstance(items[0], str):
        if not callable(getattr(processor, "pad", None)):
            raise ValueError("calibration texts need the model's tokenizer; give it, or give batches of tensors")
        calibrate, hold = items[held:], items[:held]
        short, long = lengths
        batches = tokenise(processor, calibrate, short, batch_size)
        batches += tokenise(processor, joined(processor, calibrate, long), long, max(batch_size // 4, 1))
        return batches, tokenise(processor, hold, short, batch_size)
    return items[held:], items[:held]
