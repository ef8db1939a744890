"""One run of the command: load, calibrate, convert, write, show."""

import dataclasses
import json
import os
import sys
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.initialization import no_init_weights

from hf_primal.convert import console as view
from hf_primal.convert.calibration import mixed_lengths, read_passages
from hf_primal.convert.config import ConvertConfig
from hf_primal.convert.loading import find_device, load_config, load_teacher, model_class
from hf_primal.convert.pipeline import convert_model, split_batches
from hf_primal.convert.write import check_output, write_folder
from hf_primal.layers import choose_layers
from hf_primal.modeling.modeling_primal import head_shape, self_attention_modules
from hf_primal.modeling.primal_attention import PrimalAttention

BUILT_IN = "calibrated on the text inside Python; text like yours keeps more, especially at long lengths: use --calibration"


def run(config: ConvertConfig, command: str, *, dry_run: bool, json: bool, quiet: bool) -> dict[str, Any]:
    """Convert as configured and write the folder (nothing with `dry_run`).

    Args:
        config: what to do.
        command: as typed, for the card and the report.
        dry_run: only list layers and costs.
        json: standard output is for JSON; tables go to standard error.
        quiet: print the output folder alone.

    Returns:
        The report, or the plan of a dry run, as JSON types.

    Raises:
        ValueError: bad input.
        RuntimeError: the saved folder did not reload; nothing was written.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=json or quiet, quiet=quiet or (json and not sys.stderr.isatty()))
    settings, folder = config.settings, config.folder
    find_device(config.device)
    if dry_run:
        return plan(config, console)
    check_output(folder, config.overwrite)
    passages = mixed_lengths(read_passages(config.calibration, config.text_column), config.samples, config.seed)
    teacher = load_teacher(
        config.model, config.task, config.revision, config.trust_remote_code, config.device, config.dtype
    )
    name = config.base_model or config.model
    console.print(f"[bold]{name}[/bold]: {type(teacher.model).__name__}, layers {config.layers}, {teacher.model.dtype}, {teacher.model.device}")
    with view.progress(console) as tell:
        converted, report = convert_model(
            teacher.model,
            teacher.processor,
            layers=config.layers,
            calibration=passages,
            settings=settings,
            refine_steps=config.refine_steps,
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
        notes=notes,
        calibration={"source": source, "passages": len(passages), **report.calibration},
    )
    inputs = split_batches(passages[:4], teacher.processor, config.max_length, 4, config.seed)[0][0]
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
    if quiet:
        sys.stdout.write(f"{folder}\n")
    return dataclasses.asdict(report)


def plan(config: ConvertConfig, console: Console) -> dict[str, Any]:
    """What a run would do: the layers, which would be replaced, and the cost, from the config alone (no weights)."""
    loaded = load_config(config.model, config.revision, config.trust_remote_code)
    loader, notes = model_class(loaded, config.task)
    with no_init_weights(), torch.device("meta"):
        model = loader.from_config(loaded) if hasattr(loader, "from_config") else loader(loaded)
    chosen = choose_layers(model, config.layers)
    table = Table("layer", "module", "heads x head dim", "replaced", "parameters added", title=f"{type(model).__name__}, self-attention layers")
    layers, added = [], 0
    for index, (name, module) in enumerate(self_attention_modules(model)):
        heads, dim = head_shape(module, module.config)
        extra = 0
        if index in chosen:
            with torch.device("meta"):
                primal = PrimalAttention(heads, dim, config.settings)
            extra = sum(tensor.numel() for tensor in primal.state_dict().values())
        added += extra
        layers.append({"index": index, "name": name, "heads": heads, "head_dim": dim, "replaced": index in chosen, "parameters_added": extra})
        table.add_row(str(index), name, f"{heads} x {dim}", "yes" if extra else "", f"{extra:,}" if extra else "")
    console.print(table)
    costs = Table("tokens", "softmax", "Primal-Attention", title="Multiplications of one head and token, replaced layers")
    s, d, w = config.settings.rank, layers[0]["head_dim"], config.settings.window or 0
    p, c = config.settings.features or d, (32 + 2 * w) if w else 0
    linear = 2 * p * (d + s) + (2 * s * d if config.settings.readout == "values" else 0) + c * (2 * d + s) + d * (d + 2 * s)
    rows = []
    for tokens in (128, 512, 2048, 8192):
        rows.append({"tokens": tokens, "softmax": 2 * tokens * d, "primal": linear})
        costs.add_row(f"{tokens:,}", f"{2 * tokens * d:,}", f"{linear:,}")
    console.print(costs)
    total = model.num_parameters()
    console.print(f"Parameters: {total:,} -> {total + added:,} ({added / total:+.2%}). Would write {config.folder}", soft_wrap=True)
    for note in notes:
        console.print(f"Note: {note}", style="yellow")
    return {"class": type(model).__name__, "layers": layers, "multiplications": rows, "parameters_added": added, "notes": notes}
