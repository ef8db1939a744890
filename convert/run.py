"""One run of the command: load, calibrate, convert, write, show."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Column, Table

from hf_primal.convert import console as view
from hf_primal.convert.calibration import mixed_lengths, read_passages, tokenise
from hf_primal.convert.config import ConvertConfig
from hf_primal.convert.loading import Blueprint, draw_blueprint, find_device, load_teacher
from hf_primal.convert.pipeline import convert_model
from hf_primal.convert.push import open_hub, push
from hf_primal.convert.write import check_output, write_folder
from hf_primal.layers import choose_layers
from hf_primal.modeling.modeling_primal import head_shape, self_attention_modules
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.modeling.primal_settings import PrimalSettings
from hf_primal.observe import with_decoder_inputs

BUILT_IN = (
    "Calibrated on the text inside Python; text like yours keeps more, especially at long lengths: use --calibration"
)


def run(config: ConvertConfig, command: str, *, dry_run: bool, json: bool, quiet: bool) -> dict[str, Any]:
    """Convert as configured, write the folder and push it where that is asked for (nothing of it with `dry_run`).

    Args:
        config: what to do.
        command: as typed, for the card and the report.
        dry_run: only list layers and costs.
        json: standard output is for JSON; tables go to standard error.
        quiet: print the output folder alone.

    Returns:
        The report, or the plan of a dry run, as JSON types.

    Raises:
        ValueError: bad input, or a push that failed after the folder was written.
        RuntimeError: the saved folder did not reload; nothing was written.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=json or quiet, quiet=quiet or (json and not sys.stderr.isatty()))
    config.settings()  # what is wrong with it alone is told before any work
    folder = config.folder
    find_device(config.device)
    if not dry_run:
        check_output(folder, config.overwrite)
        if config.push_to_hub:
            open_hub(config.push_to_hub, config.private)
    blueprint = draw_blueprint(config.model, config.task, config.revision, config.trust_remote_code)
    chosen = choose_layers(blueprint.model, config.layers)
    settings = config.settings(any(getattr(module, "is_causal", False) for _, module in chosen.values()))
    added = {index: added_parameters(module, settings) for index, (_, module) in chosen.items()}
    if dry_run:
        return plan(config, settings, blueprint, added, console)
    if blueprint.model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(blueprint.model).__name__} takes {blueprint.model.main_input_name}, and the command calibrates on "
            "text alone; use hf_primal.convert_model with batches of them"
        )
    passages = mixed_lengths(read_passages(config.calibration, config.text_column), config.samples, config.seed)
    teacher = load_teacher(
        config.model, blueprint, config.revision, config.trust_remote_code, config.device, config.dtype
    )
    name = config.base_model or config.model
    console.print(
        f"[bold]{name}[/bold]: {type(teacher.model).__name__}, layers {config.layers}, "
        f"{str(teacher.model.dtype).removeprefix('torch.')}, {teacher.model.device}"
    )
    with view.progress(console) as tell:
        converted, report = convert_model(
            teacher.model,
            teacher.processor,
            layers=config.layers,
            calibration=passages,
            settings=settings,
            refine_steps=config.refine_steps,
            fold=config.fold,
            max_length=config.max_length,
            batch_size=config.batch_size,
            memory_gb=config.memory,
            seed=config.seed,
            progress=tell,
        )
    notes = teacher.notes + ([BUILT_IN] if config.calibration is None else [])
    source = config.calibration or "the text inside Python"
    report = dataclasses.replace(
        report,
        model=name,
        command=command,
        notes=report.notes + notes,
        calibration={"source": source, "passages": len(passages), **report.calibration},
    )
    inputs = tokenise(teacher.processor, passages[:4], report.calibration["max_length"], 4)[0]
    inputs = with_decoder_inputs(teacher.model, inputs)
    base_model = config.base_model or (None if os.path.isdir(config.model) else config.model)
    with console.status("Saving, and reloading in a fresh process"):
        write_folder(
            folder,
            converted,
            teacher.processor,
            report,
            config.model,
            base_model,
            {key: value.to(converted.device) for key, value in inputs.items()},
        )
    view.show_report(console, report)
    console.print(f"Saved and proven to reload: [bold]{folder}[/bold]", soft_wrap=True)
    if config.push_to_hub:
        with console.status(f"Pushing to {config.push_to_hub}"):
            address = push_saved(folder, config.push_to_hub, config.private)
        console.print(f"Pushed: [bold]{address}[/bold]", soft_wrap=True)
    if quiet:
        sys.stdout.write(f"{folder}\n")
    return dataclasses.asdict(report)


def push_saved(folder: Path, name: str, private: bool) -> str:
    """Push what a run has written; the address.

    Raises:
        ValueError: it failed; where the folder is, and how to push it.
        KeyboardInterrupt: likewise.
    """
    again = shlex.join(["primal-convert", "push", str(folder), name, *(["--private"] if private else [])])
    try:
        return push(folder, name, private=private)
    except ValueError as error:
        raise ValueError(f"{error}; the model is saved, push it with: {again}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the model is saved, push it with: {again}") from None


def added_parameters(module: Any, settings: PrimalSettings) -> int:
    """Parameters that a replaced attention module adds to the model.

    Raises:
        ValueError: settings that do not fit its heads.
    """
    with torch.device("meta"):
        primal = PrimalAttention(*head_shape(module, module.config), settings)
    return sum(parameter.numel() for parameter in primal.parameters())


def multiplications(head_dim: int, settings: PrimalSettings) -> int:
    """Multiplications of a Primal-Attention layer per head and token, at any length; softmax takes 2 N d."""
    s, d, p, w = settings.rank, head_dim, settings.features or head_dim, settings.window or 0
    maps = 2 * p * d if settings.feature_map == "landmark" else 0
    context = 2 * s * d + d * d + (32 + 2 * w if w else 0) * (2 * d + s) if settings.readout == "values" else 0
    return maps + 2 * p * s + context + 2 * s * d


def plan(
    config: ConvertConfig, settings: PrimalSettings, blueprint: Blueprint, added: dict[int, int], console: Console
) -> dict[str, Any]:
    """What a run would do: the layers, which would be replaced, and the cost, from the config alone (no weights)."""
    name = type(blueprint.model).__name__
    table = Table(
        "layer", Column("module", overflow="fold"), "heads", "parameters added", title=f"Self-attention of {name}"
    )
    layers: list[dict[str, Any]] = []
    for index, (path, module) in enumerate(self_attention_modules(blueprint.model)):
        heads, dim = head_shape(module, module.config)
        extra = added.get(index, 0)
        table.add_row(str(index), path, f"{heads} x {dim}", f"{extra:,}" if index in added else "kept as it is")
        layers.append({"index": index, "name": path, "heads": heads, "head_dim": dim, "parameters_added": extra})
    console.print(table)
    costs = Table("tokens", "softmax", "Primal-Attention", title="Multiplications per head, token")
    dim = next(layer["head_dim"] for layer in layers if layer["index"] in added)
    rows = [(tokens, 2 * tokens * dim, multiplications(dim, settings)) for tokens in (128, 512, 2048, 8192)]
    for row in rows:
        costs.add_row(*(f"{number:,}" for number in row))
    console.print(costs)
    before, extra = blueprint.model.num_parameters(), sum(added.values())
    console.print(f"Parameters: {before:,} -> {before + extra:,} ({extra / before:+.2%})")
    console.print(f"Would write {config.folder}", soft_wrap=True)
    for note in blueprint.notes:
        console.print(f"Note: {note}", style="yellow")
    return {
        "class": name,
        "layers": layers,
        "replaced": sorted(added),
        "parameters": before,
        "parameters_added": extra,
        "multiplications": [dict(zip(("tokens", "softmax", "primal"), row, strict=True)) for row in rows],
        "notes": blueprint.notes,
    }
