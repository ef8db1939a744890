"""From a converted model in memory to a proven folder: written beside its place, verified, then renamed."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from hf_primal.convert.verify import verify_reload
from hf_primal.model_cards import converted_card
from hf_primal.report import ConversionReport, write_plots

REPORT = "conversion_report.json"


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, or that --overwrite would not dare to replace.

    Raises:
        ValueError: it is there already, or its parent is not.
    """
    if not folder.parent.is_dir():
        raise ValueError(f"--output {folder}: folder {folder.parent} does not exist; create it first")
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(f"--output {folder} exists; give another --output, or --overwrite to replace it")
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / REPORT).is_file()):
        raise ValueError(
            f"--output {folder} was not written by primal-convert, so --overwrite leaves it alone; "
            "give another --output"
        )


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place on success and vanishes on any error."""
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
        staging.chmod(0o755)
        if folder.exists():
            old = staging.with_name(f"{staging.name}-old")
            folder.rename(old)
            try:
                staging.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_folder(
    folder: Path,
    converted: PreTrainedModel,
    processor: Any,
    report: ConversionReport,
    source: str,
    base_model: str | None,
    inputs: Mapping[str, Tensor],
) -> None:
    """Save everything a user of the model needs, prove that it reloads, and put it in place.

    Args:
        folder: the output.
        converted: the model.
        processor: its tokenizer, or None.
        report: of the conversion.
        source: folder or hub id that the teacher came from.
        base_model: hub id to name in the card, or None.
        inputs: keyword arguments for the forward that the reload is checked with.

    Raises:
        ValueError: not enough room on the disk.
        RuntimeError: the folder does not reload as it was saved.
    """
    need, free = sum(tensor.nbytes for tensor in converted.state_dict().values()), shutil.disk_usage(folder.parent).free
    if need + 50_000_000 > free:
        raise ValueError(
            f"--output {folder} needs about {need / 1e6 + 50:.0f} MB and the disk has {free / 1e6:.0f} MB left"
        )
    with staged(folder) as staging:
        converted.save_pretrained(staging)
        if processor is not None:
            processor.save_pretrained(staging)
        copy_sentence_modules(source, staging)
        (staging / REPORT).write_text(report.to_json())
        plots = write_plots(report, staging)
        code = f"modeling_primal.{report.converted_class}"
        auto = next((name for name, value in converted.config.auto_map.items() if value == code), "AutoModel")
        card = converted_card(report, folder.name, auto, plots, base_model, license_of(source))
        (staging / "README.md").write_text(card, encoding="utf-8")
        verify_reload(staging, converted, inputs)


def find_file(source: str, name: str) -> Path | None:
    """A file of the teacher's folder or hub repository, or None."""
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return Path(found) if found else None


def license_of(source: str) -> str | None:
    """The licence that the base model's card names."""
    card = find_file(source, "README.md")
    return ModelCard.load(card, ignore_metadata_errors=True).data.get("license") if card else None


def copy_sentence_modules(source: str, folder: Path) -> None:
    """Keep a sentence encoder one: copy what sentence-transformers needs beside the model (pooling and the like)."""
    listing = find_file(source, "modules.json")
    if not listing:
        return
    names = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"]
    for module in json.loads(listing.read_text()):
        if module["path"]:
            names += [f"{module['path']}/{name}" for name in ("config.json", "model.safetensors", "pytorch_model.bin")]
    for name in names:
        found = find_file(source, name)
        if found:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(found, folder / name)
