"""The options of `finetune.py`: one typed dataclass, filled from a YAML file and from flags, which win."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from transformers import HfArgumentParser, SchedulerType

TASKS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "sentence-similarity": "AutoModel",
}
METRICS = {
    "sequence-classification": ["accuracy"],
    "regression": ["pearsonr", "spearmanr"],
    "token-classification": ["accuracy", "f1"],
    "image-classification": ["accuracy"],
    "sentence-similarity": ["spearmanr"],
}
STAGES = ("match", "distill", "task")
PARTS = ("primal", "primal+lora", "replaced-layers", "all")


def option(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    """A field with the text that --help shows for it."""
    metadata = {"help": text} | ({"choices": list(choices)} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass
class FineTuneConfig:
    """What one run does; every field is a key of the YAML file and a flag."""

    model: str = option("", "folder or hub id; a converted model, or any other of Transformers")
    train: str = option("", "csv, json, jsonl, parquet, txt, image folder, saved dataset or hub id")
    output: str = option("", "folder of the trained model; checkpoints and logs go to OUTPUT-run beside it")
    task: str = option("sequence-classification", "what the labels are", tuple(TASKS))
    evaluation: str | None = option(None, "as train; none: the evaluation split of train, or a tenth of it")
    data_config: str | None = option(None, "configuration of a hub dataset")
    train_split: str = option("train", "split of a hub or saved dataset")
    evaluation_split: str = option("validation", "split of a hub or saved dataset, where it has one of that name")
    text_columns: list[str] = field(
        default_factory=lambda: ["text"], metadata={"help": "one, or two for pairs; words of token classification"}
    )
    label_column: str = option("label", "classes, scores, or lists of tags")
    image_column: str = option("image", "images of image-classification")
    num_labels: int | None = option(None, "classes of a streamed dataset with integer labels")
    streaming: bool = option(False, "read train as it goes; needs max_steps")
    max_length: int = option(128, "tokens a text is cut to; the length of a block of packed text")
    packing: bool = option(True, "causal-lm: join texts and cut them into full blocks")
    mask_fraction: float = option(0.15, "masked-lm: part of the tokens to predict")
    max_train_samples: int | None = option(None, "use this many rows alone")
    max_eval_samples: int | None = option(None, "use this many rows alone")
    stages: list[str] = field(
        default_factory=lambda: ["task"],
        metadata={"help": "in this order: match, distill, task", "choices": list(STAGES)},
    )
    teacher: str | None = option(None, "model whose outputs match and distill aim at, and task too if given")
    match_steps: int = option(200, "optimiser steps of match")
    distill_steps: int = option(500, "optimiser steps of distill")
    temperature: float = option(2.0, "of the distillation's softmax")
    distill_weight: float = option(1.0, "weight of the teacher's logits in the task stage")
    trains: str = option("all", "what trains beside a new head", PARTS)
    lora_rank: int = option(16, "of primal+lora")
    lora_targets: list[str] = field(
        default_factory=list, metadata={"help": "module names; none: every linear layer but the head"}
    )
    save_adapter: bool = option(False, "primal+lora: save the adapter alone to OUTPUT-run/adapter too")
    ksvd_weight: float | None = option(None, "weight of the KSVD loss; none: the model's own; 0: off")
    epochs: float = option(3.0, "of the task stage")
    max_steps: int = option(-1, "optimiser steps of the task stage; above 0 it wins over epochs")
    batch_size: int = option(32, "rows a process and micro-batch")
    eval_batch_size: int = option(64, "rows a process")
    group_by_length: bool = option(False, "batches of texts of similar length: less padding, less time")
    accumulation: int = option(1, "micro-batches an optimiser step")
    learning_rate: float = option(5e-5, "of everything but the two below")
    primal_learning_rate: float | None = option(None, "of the Primal-Attention parameters; none: learning_rate")
    head_learning_rate: float | None = option(None, "of the task's head; none: learning_rate")
    weight_decay: float = option(0.01, "of matrices outside the Primal-Attention layers")
    schedule: str = option("linear", "of the learning rates", tuple(kind.value for kind in SchedulerType))
    warmup: float = option(0.1, "part of a stage's steps")
    clip: float = option(1.0, "norm that gradients are clipped to; 0: not")
    mixed_precision: str | None = option(None, "none: as accelerate launch says", ("no", "bf16", "fp16"))
    gradient_checkpointing: bool = option(False, "less memory, more time")
    compile: str = option("no", "backend of torch.compile, such as inductor")
    seed: int = option(0, "of the order, the head, dropout and masks")
    eval_steps: int = option(0, "evaluate and keep a checkpoint every n steps; 0: at the end of every epoch")
    metrics: list[str] = field(
        default_factory=list, metadata={"help": "scripts in recipes/metrics or names on the hub; none: the task's own"}
    )
    best_metric: str | None = option(None, "that chooses the best checkpoint; none: the first metric, or loss")
    patience: int = option(0, "stop after this many evaluations without a better one; 0: never")
    resume: bool = option(False, "go on from the latest checkpoint in OUTPUT-run")
    overwrite: bool = option(False, "replace OUTPUT and OUTPUT-run")
    trackers: list[str] = field(default_factory=list, metadata={"help": "of Accelerate, such as tensorboard"})
    log_steps: int = option(10, "steps between two lines of the log")
    push_to_hub: str | None = option(None, "USER/NAME to publish the result under")
    private: bool = option(False, "make that repository private")

    def __post_init__(self) -> None:
        """Check what no other part checks.

        Raises:
            ValueError: a missing option, a number out of range, or choices that do not go together.
        """
        for name in ("model", "train", "output"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing; give it as a flag or in the config")
        self._check_numbers()
        if not self.stages or [stage for stage in STAGES if stage in self.stages] != self.stages:
            raise ValueError(f"--stages must be some of {', '.join(STAGES)} in this order, got {self.stages}")
        if {"match", "distill"} & set(self.stages) and not self.teacher:
            raise ValueError("stages match and distill need --teacher")
        if self.streaming and self.max_steps < 1:
            raise ValueError("--streaming has no known length; give --max_steps")
        if self.group_by_length and (self.streaming or self.task in ("image-classification", "sentence-similarity")):
            raise ValueError("--group_by_length needs rows of one text, or a pair in one, that are not streamed")
        if self.task == "sentence-similarity" and len(self.text_columns) != 2:
            raise ValueError("task sentence-similarity needs two --text_columns")

    def _check_numbers(self) -> None:
        """Refuse numbers out of range."""
        counts = ("match_steps", "distill_steps", "batch_size", "eval_batch_size", "accumulation", "max_length")
        for name in (*counts, "lora_rank", "log_steps", "max_train_samples", "max_eval_samples", "num_labels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be >= 1, got {value}")
        for name in ("learning_rate", "temperature", "epochs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be > 0, got {getattr(self, name)}")

    @property
    def ranked_by(self) -> tuple[str, bool]:
        """The metric that chooses the best checkpoint, and whether more of it is better."""
        own = self.metrics or METRICS.get(self.task, [])
        name = self.best_metric or (own[0] if own else "loss")
        return name, name not in ("loss", "perplexity", "mse", "mae")


def read_config(argv: Sequence[str]) -> FineTuneConfig:
    """Options from `--config FILE.yaml` and from flags.

    Raises:
        ValueError: an unknown key, or a value that is not of its field's type.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    given, flags = first.parse_known_args(argv)
    keys: dict[str, Any] = {}
    if given.config:
        try:
            with open(given.config, encoding="utf-8") as file:
                keys = yaml.safe_load(file) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config {given.config} cannot be read: {str(error).splitlines()[0]}") from error
    known = {one.name for one in dataclasses.fields(FineTuneConfig)}
    if not isinstance(keys, dict) or set(keys) - known:
        unknown = ", ".join(sorted(map(str, set(keys) - known))) if isinstance(keys, dict) else "no keys at all"
        raise ValueError(f"--config {given.config} has {unknown}; the keys are {', '.join(sorted(known))}")
    typed: list[str] = []
    for name, value in keys.items():  # as flags, so that one parser checks every value
        if value is not None and value != []:
            typed += [f"--{name}", *(str(part) for part in (value if isinstance(value, list) else [value]))]
    parser = HfArgumentParser(FineTuneConfig, allow_abbrev=False, usage="finetune.py [--config FILE.yaml] [options]")
    (config,) = parser.parse_args_into_dataclasses([*typed, *flags], look_for_args_file=False)
    return config
