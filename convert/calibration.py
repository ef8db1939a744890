"""Calibration text: where it comes from, how passages of mixed lengths are drawn from it, and batches for the model."""

import copy
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_primal.convert.hub import HUB_ID, first_line, go_offline_without_hub

TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HUB_ROWS = 5000  # of a hub dataset, streamed


def read_passages(source: str | None, column: str | None = None) -> list[str]:
    """All passages of a calibration source, blank ones left out.

    Args:
        source: a text file (one passage a line, or separated by blank lines), a csv, json, jsonl or parquet file, a
            folder saved by datasets, or a hub dataset id (its train split, or its first); None for the text that
            ships inside Python.
        column: the text column of a table; may be None where there is just one text column.

    Raises:
        ValueError: nothing there, no such column, or no text.
    """
    if source is None:
        passages = python_text()
    elif Path(source).is_file() and Path(source).suffix.lower() not in TABLES:
        passages = split_text(read_text(Path(source)))
    else:
        passages = read_column(source, column)
    passages = [" ".join(passage.split()) for passage in passages if passage and passage.strip()]
    if not passages:
        raise ValueError(f"--calibration {source} has no text in it; give at least one passage")
    return passages


def python_text(size: int = 1000) -> list[str]:
    """The documentation that ships inside Python, in passages of about `size` characters."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python ships without pydoc_data, the built-in text; give --calibration") from error
    passages = []
    for topic in topics.values():
        passage = ""
        for paragraph in topic.split("\n\n"):
            passage = f"{passage} {paragraph}"
            if len(passage) >= size:
                passages.append(passage)
                passage = ""
        passages.append(passage)
    return passages


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--calibration {path} is not text in UTF-8; give .txt, {', '.join(TABLES)}") from error


def split_text(text: str) -> list[str]:
    """Passages separated by blank lines, or one a line when no line is blank."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
    return blocks if len(blocks) > 1 else text.splitlines()


def read_column(source: str, column: str | None) -> list[str]:
    """The text column of a table, a saved dataset or a hub dataset."""
    table = open_table(source)
    texts = [name for name, kind in table.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    known = ", ".join(texts) or "none"
    if column is None and len(texts) != 1:
        raise ValueError(
            f"--calibration {source} has {len(texts)} text columns ({known}); choose one with --text-column"
        )
    column = column or texts[0]
    if column not in texts:
        raise ValueError(f"--text-column {column!r} is not a text column of {source}; it has {known}")
    return list(table[column])


def open_table(source: str) -> Any:
    """A file, a folder saved by datasets, or the first `HUB_ROWS` rows of a hub dataset, as a datasets.Dataset."""
    path = Path(source)
    hub = not path.exists()
    if hub:
        if path.suffix.lower() in (*TABLES, ".txt") or not HUB_ID.fullmatch(source):
            raise ValueError(f"--calibration {source!r} is neither a file, nor a folder, nor a hub dataset id")
        go_offline_without_hub()
    import datasets  # after the hub was looked for, because it reads the answer when it is imported
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    datasets.disable_progress_bars()
    try:
        if hub:
            table = datasets.load_dataset(source, streaming=True)
        elif path.is_dir():
            table = datasets.load_from_disk(source)
        else:
            table = datasets.load_dataset(TABLES[path.suffix.lower()], data_files=str(path), split="train")
        if isinstance(table, dict):
            table = table["train"] if "train" in table else next(iter(table.values()))
        return datasets.Dataset.from_list(list(table.take(HUB_ROWS))) if hub else table
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        where = "a dataset that the hub gives" if hub else "a folder saved by datasets"
        raise ValueError(f"--calibration {source!r} is not {where}: {first_line(error)}") from error
    except DatasetGenerationError as error:
        raise ValueError(f"--calibration {source} cannot be read: {first_line(error.__cause__ or error)}") from error


def mixed_lengths(passages: Sequence[str], samples: int, seed: int) -> list[str]:
    """At most `samples` passages, about half of them whole and half single sentences of the others.

    Far attention is learnt from long passages, the short ones show what users often send; both together calibrate
    better than either.
    """
    order = list(passages)
    random.Random(seed).shuffle(order)
    whole = order[: max(samples // 2, 1)]
    rest = order[len(whole) :] or whole
    sentences = [part for passage in rest for part in re.split(r"(?<=[.!?])\s+", passage) if len(part) > 20]
    random.Random(seed + 1).shuffle(sentences)
    return (whole + sentences[: samples - len(whole)] + order[len(whole) :])[:samples]


def joined(tokenizer: PreTrainedTokenizerBase, passages: Sequence[str], tokens: int) -> list[str]:
    """Consecutive passages put together to texts of at least `tokens` tokens; what is left at the end is dropped.

    They show the layers attention at a distance that the passages alone do not have.
    """
    texts: list[str] = []
    parts: list[str] = []
    length = 0
    for passage in passages:
        parts.append(passage)
        length += len(tokenizer(passage, truncation=True, add_special_tokens=False)["input_ids"])
        if length >= tokens:
            texts.append(" ".join(parts))
            parts, length = [], 0
    return texts


def tokenise(
    tokenizer: PreTrainedTokenizerBase, passages: Sequence[str], max_length: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """Padded batches of passages of similar length.

    Args:
        tokenizer: the model's.
        passages: texts.
        max_length: tokens a passage is cut to, at most what the model has positions for.
        batch_size: passages a batch.

    Returns:
        Keyword arguments of the model's forward, (B, N) int64 each.
    """
    if tokenizer.pad_token is None:  # as decoders' tokenizers; what stands at padding is never looked at
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    encoded: list[Mapping[str, Any]] = [tokenizer(text, truncation=True, max_length=max_length) for text in passages]
    encoded.sort(key=lambda one: len(one["input_ids"]))
    return [
        dict(tokenizer.pad(encoded[start : start + batch_size], return_tensors="pt"))  # type: ignore[arg-type]
        for start in range(0, len(encoded), batch_size)
    ]
