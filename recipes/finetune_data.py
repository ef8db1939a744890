"""Rows to batches for `finetune.py`: where data comes from, what a task's labels are, and how rows are encoded."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from finetune_config import FineTuneConfig
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
)

FILES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
CLASSES = ("sequence-classification", "token-classification", "image-classification")


@dataclass
class Data:
    """Encoded rows of both parts, how to batch them, and the names of the classes (None without classes)."""

    train: Any
    evaluation: Any
    collate: Callable[[list[Any]], dict[str, torch.Tensor]]
    labels: list[str] | None


def open_split(source: str, split: str, config: FineTuneConfig, streaming: bool = False) -> Any:
    """One split of a file, an image folder, a saved dataset or a hub dataset.

    Raises:
        ValueError: there is nothing of the kind, or it cannot be read.
    """
    path = Path(source)
    try:
        if path.is_file():
            if path.suffix.lower() not in FILES:
                raise ValueError(f"{source}: files are {', '.join(FILES)}")
            kind = FILES[path.suffix.lower()]
            return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=streaming)
        if (path / "dataset_dict.json").is_file():
            return datasets.load_from_disk(source)[split]
        if (path / "dataset_info.json").is_file():
            saved = datasets.load_from_disk(source)
            return saved.to_iterable_dataset() if streaming else saved
        if path.is_dir():
            return datasets.load_dataset("imagefolder", data_dir=source, split=split, streaming=streaming)
        return datasets.load_dataset(source, config.data_config, split=split, streaming=streaming)
    except KeyError as error:
        raise ValueError(f"{source} has no split {split!r}; see --train_split and --evaluation_split") from error
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise ValueError(f"{source!r} is no file, no folder of data and no dataset the hub gives") from error
    except DatasetGenerationError as error:
        raise ValueError(f"{source} cannot be read: {str(error.__cause__ or error).splitlines()[0]}") from error


def open_both(config: FineTuneConfig) -> tuple[Any, Any]:
    """Training and evaluation rows; without evaluation data the last tenth of a shuffled train is held out."""
    train = open_split(config.train, config.train_split, config, config.streaming)
    if config.evaluation:
        evaluation = open_split(config.evaluation, config.evaluation_split, config)
    elif not config.streaming and not Path(config.train).is_file():
        try:
            evaluation = open_split(config.train, config.evaluation_split, config)
        except ValueError:
            evaluation = None
    else:
        evaluation = None
    if evaluation is None:
        if config.streaming:
            raise ValueError("a streamed train has no part to hold out; give --evaluation")
        parts = train.train_test_split(test_size=0.1, seed=config.seed)
        train, evaluation = parts["train"], parts["test"]
    if config.max_train_samples:
        train = train.take(config.max_train_samples) if config.streaming else first(train, config.max_train_samples)
    return train, first(evaluation, config.max_eval_samples)


def first(rows: Any, count: int | None) -> Any:
    """The first rows of a dataset; all of them for None."""
    return rows if count is None else rows.select(range(min(count, len(rows))))


def needed_columns(config: FineTuneConfig) -> list[str]:
    """Columns that the task reads."""
    inputs = [config.image_column] if config.task == "image-classification" else config.text_columns
    return [*inputs] if config.task in ("masked-lm", "causal-lm") else [*inputs, config.label_column]


def check_columns(rows: Any, config: FineTuneConfig, source: str) -> None:
    """Refuse data that lacks a column.

    Raises:
        ValueError: naming the column and those that are there.
    """
    there = rows.column_names or list(next(iter(rows)))
    for column in needed_columns(config):
        if column not in there:
            raise ValueError(
                f"{source} has no column {column!r}; it has {', '.join(there)}: see --text_columns, --label_column"
            )


def label_names(train: Any, config: FineTuneConfig) -> list[str] | None:
    """Names of the classes, in the order of their numbers.

    Raises:
        ValueError: integers that do not start at 0 or leave numbers out, or a stream whose classes are not known.
    """
    if config.task not in CLASSES:
        return None
    kind = (train.features or {}).get(config.label_column)
    kind = getattr(kind, "feature", kind)
    if isinstance(kind, datasets.ClassLabel):
        return list(kind.names)
    if config.num_labels:
        return [str(number) for number in range(config.num_labels)]
    if config.streaming:
        raise ValueError("the classes of a streamed dataset are not known; give --num_labels")
    column = train[config.label_column]
    found = sorted({tag for tags in column for tag in (tags if isinstance(tags, list) else [tags])} - {-100, None})
    if all(isinstance(label, int) for label in found):
        if found != list(range(len(found))):
            raise ValueError(f"labels must be 0..{len(found) - 1} without gaps, got {found[:10]}; see --num_labels")
        return [str(label) for label in found]
    return [str(label) for label in found]


def number_of(label: Any, labels: Sequence[str]) -> int:
    """The number of a class given by number or name.

    Raises:
        ValueError: there is no such class.
    """
    if isinstance(label, str):
        if label not in labels:
            raise ValueError(f"label {label!r} is not one of the classes of train: {', '.join(labels)}")
        return labels.index(label)
    if label != -100 and not 0 <= label < len(labels):
        raise ValueError(f"label {label} is out of range; train has the classes 0..{len(labels) - 1}")
    return int(label)


def encoder(config: FineTuneConfig, processor: Any, labels: list[str] | None) -> Callable[..., dict[str, Any]]:
    """The function from rows of the data to the model's keyword arguments, for `datasets.map`."""
    cut = {"truncation": True, "max_length": config.max_length}

    def classes(rows: Mapping[str, Any]) -> dict[str, Any]:
        encoded = processor(*(rows[column] for column in config.text_columns), **cut)
        return {**encoded, "labels": [number_of(label, labels or []) for label in rows[config.label_column]]}

    def scores(rows: Mapping[str, Any]) -> dict[str, Any]:
        encoded = processor(*(rows[column] for column in config.text_columns), **cut)
        return {**encoded, "labels": [float(score) for score in rows[config.label_column]]}

    def tags(rows: Mapping[str, Any]) -> dict[str, Any]:
        encoded = processor(rows[config.text_columns[0]], is_split_into_words=True, **cut)
        aligned = []
        for row, given in enumerate(rows[config.label_column]):
            words = encoded.word_ids(row)  # a word's first piece has its tag, the others none
            starts = [word is not None and (at == 0 or words[at - 1] != word) for at, word in enumerate(words)]
            aligned.append(
                [
                    number_of(given[word], labels or []) if here else -100
                    for word, here in zip(words, starts, strict=True)
                ]
            )
        return {**encoded, "labels": aligned}

    def pairs(rows: Mapping[str, Any]) -> dict[str, Any]:
        one, two = (processor(rows[column], **cut)["input_ids"] for column in config.text_columns)
        return {"first": one, "second": two, "score": [float(score) for score in rows[config.label_column]]}

    def text(rows: Mapping[str, Any]) -> dict[str, Any]:
        return dict(processor([line for line in rows[config.text_columns[0]] if line and line.strip()], **cut))

    def blocks(rows: Mapping[str, Any]) -> dict[str, Any]:
        end = [processor.eos_token_id] if processor.eos_token_id is not None else []
        ids = [i for line in rows[config.text_columns[0]] if line for i in processor(line)["input_ids"] + end]
        size = config.max_length
        return {"input_ids": [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]}

    def images(rows: Mapping[str, Any]) -> dict[str, Any]:
        pixels = processor([image.convert("RGB") for image in rows[config.image_column]], return_tensors="np")
        return {**pixels, "labels": [number_of(label, labels or []) for label in rows[config.label_column]]}

    return {
        "sequence-classification": classes,
        "regression": scores,
        "token-classification": tags,
        "masked-lm": text,
        "causal-lm": blocks if config.packing else text,
        "image-classification": images,
        "sentence-similarity": pairs,
    }[config.task]


def refusing_empty_cells(
    encode: Callable[..., dict[str, Any]], config: FineTuneConfig
) -> Callable[..., dict[str, Any]]:
    """The same function, which raises ValueError for rows that lack what the task reads; blank text lines are fine."""
    columns = [] if config.task in ("masked-lm", "causal-lm") else needed_columns(config)

    def encode_whole(rows: Mapping[str, Any]) -> dict[str, Any]:
        for column in columns:
            if any(cell is None for cell in rows[column]):
                raise ValueError(f"column {column!r} has empty cells; drop those rows")
        return encode(rows)

    return encode_whole


def collator(config: FineTuneConfig, processor: Any) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    """The function from encoded rows to a padded batch."""
    if config.task == "token-classification":
        return DataCollatorForTokenClassification(processor)
    if config.task == "image-classification":
        return DefaultDataCollator()
    if getattr(processor, "pad_token", "") is None:  # as decoders' tokenizers
        processor.pad_token = processor.eos_token or processor.convert_ids_to_tokens(0)
    pad = DataCollatorWithPadding(processor)
    if config.task == "sentence-similarity":

        def both(rows: list[Any]) -> dict[str, torch.Tensor]:
            texts = [{"input_ids": row[side]} for side in ("first", "second") for row in rows]
            return {**pad(texts), "labels": torch.tensor([row["score"] for row in rows])}

        return both
    return pad


def load_data(config: FineTuneConfig, processor: Any) -> Data:
    """Everything between the options and the batches.

    Raises:
        ValueError: data that is not there, lacks a column or has labels out of range.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loaders may fork
    datasets.disable_progress_bars()
    train, evaluation = open_both(config)
    check_columns(train, config, config.train)
    check_columns(evaluation, config, config.evaluation or config.train)
    labels = label_names(train, config)
    encode = refusing_empty_cells(encoder(config, processor, labels), config)
    train, evaluation = (
        rows.map(encode, batched=True, remove_columns=rows.column_names or list(next(iter(rows))))
        for rows in (train, evaluation)
    )
    if not config.streaming and not len(train):
        raise ValueError(f"{config.train} has no rows to train on (or not one block of --max_length tokens)")
    if not len(evaluation):
        raise ValueError(f"{config.evaluation or config.train} has no rows to evaluate on")
    if config.streaming:
        train = train.shuffle(seed=config.seed, buffer_size=1000)
    return Data(train, evaluation, collator(config, processor), labels)
