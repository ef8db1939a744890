"""Fine-tune a converted model (or any other) with Accelerate: match, distill, task, evaluate, save, publish.

    accelerate launch recipes/finetune.py --config recipes/configs/sst2.yaml --model DIR --train FILE.csv --output DIR

One process, several (torchrun or accelerate launch), one GPU or several: the same command; for FSDP and DeepSpeed see
configs/accelerate. Every key of the config is a flag too. What is random in a step depends on the seed and the step
alone, so that a resumed run repeats one that was not interrupted.
"""

import dataclasses
import importlib.metadata
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evaluate
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, TorchDynamoPlugin, broadcast_object_list, set_seed, tqdm
from finetune_config import METRICS, TASKS, FineTuneConfig, read_config
from finetune_data import Data, load_data
from finetune_errors import explain, writing
from finetune_losses import distill_loss, match_loss, similarity, task_loss
from finetune_parts import (
    block_classes,
    choose_parameters,
    comparable,
    groups_of,
    head_names,
    of_stage,
    restore,
    shared_parameters,
)
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoTokenizer, DataCollatorForLanguageModeling, get_scheduler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_primal.convert.push import open_hub, push
from hf_primal.convert.verify import verify_reload
from hf_primal.convert.write import copy_sentence_modules, license_of, staged
from hf_primal.model_cards import FineTuning, finetuned_card

REPORT = "training_report.json"
HERE = Path(__file__).parent


@dataclasses.dataclass
class Progress:
    """How far a run has come; travels with every checkpoint."""

    stage: int = 0  # index into config.stages
    step: int = 0  # optimiser steps of the stage
    batches: int = 0  # micro-batches of the stage
    best: float | None = None
    best_checkpoint: str | None = None
    waited: int = 0  # evaluations without a better one
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Run:
    """What all stages share."""

    def __init__(self, config: FineTuneConfig, command: str) -> None:
        self.config, self.command = config, command
        plugin = None if config.compile == "no" else TorchDynamoPlugin(backend=config.compile, dynamic=True)
        self.folder = Path(config.output).absolute()
        self.work = self.folder.with_name(f"{self.folder.name}-run")
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config.accumulation,
            mixed_precision=config.mixed_precision,
            dynamo_plugin=plugin,
            log_with=config.trackers or None,
            project_dir=str(self.work),
            step_scheduler_with_optimizer=False,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=config.seed),
        )
        self.console = Console(quiet=not self.accelerator.is_main_process)
        self.progress = Progress()

    # ---- checkpoints: written beside, then renamed, so that the last one is always whole ----

    def checkpoints(self) -> list[Path]:
        """Those there are, the latest last."""
        found = self.work.glob("checkpoint-*-*")
        return sorted(found, key=lambda path: tuple(map(int, path.name.split("-")[1:])))

    def save_checkpoint(self, better: bool) -> None:
        """Everything needed to go on from here; older ones go, but for the best."""
        progress = self.progress
        name = f"checkpoint-{progress.stage}-{progress.step}"
        if better:
            progress.best_checkpoint = name
        scratch, final = self.work / f"writing-{name}", self.work / name
        with writing(self.work, scratch):
            self.accelerator.save_state(str(scratch))
            if self.accelerator.is_main_process:
                (scratch / "progress.json").write_text(json.dumps(dataclasses.asdict(progress), indent=2))
        self.accelerator.wait_for_everyone()  # each process writes a part of it
        if self.accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            for old in self.checkpoints():
                if old.name not in (name, progress.best_checkpoint):
                    shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def prepare_folders(self) -> None:
        """Make room for the output.

        Raises:
            ValueError: a folder is in the way, or there is nothing to resume.
        """
        config, main = self.config, self.accelerator.is_main_process
        if config.resume:
            if not self.checkpoints():
                raise ValueError(f"--resume: {self.work} has no checkpoint; start without it, or with --overwrite")
            latest = json.loads((self.checkpoints()[-1] / "progress.json").read_text())
            self.progress = Progress(**latest)
        elif (self.folder.exists() or (self.work.exists() and any(self.work.iterdir()))) and not config.overwrite:
            raise ValueError(f"--output {config.output}: it or its -run exists; use --resume, --overwrite or another")
        elif self.folder.exists() and not (self.folder / REPORT).is_file():
            raise ValueError(f"--output {config.output} was not written by this recipe; give another")
        self.accelerator.wait_for_everyone()
        if main and not config.resume:
            shutil.rmtree(self.work, ignore_errors=True)
        if main:
            self.work.mkdir(parents=True, exist_ok=True)
            for stale in self.work.glob("writing-*"):
                shutil.rmtree(stale)
        self.accelerator.wait_for_everyone()


def load_processor(config: FineTuneConfig) -> Any:
    """The tokenizer or image processor of the model."""
    kind = AutoImageProcessor if config.task == "image-classification" else AutoTokenizer
    return kind.from_pretrained(config.model, trust_remote_code=True)


def load_model(config: FineTuneConfig, name: str, labels: list[str] | None, own: bool) -> Any:
    """A model under the task's Auto class; `own` is the one that trains, else it is the teacher."""
    extra: dict[str, Any] = {}
    if labels:
        extra = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    if config.task == "regression":
        extra = {"num_labels": 1, "problem_type": "regression"}
    if own and config.ksvd_weight is not None and "primal" in json_config(name):
        extra["ksvd_weight"] = config.ksvd_weight
    auto = getattr(transformers, TASKS[config.task])
    model = auto.from_pretrained(name, trust_remote_code=True, dtype=torch.float32 if own else "auto", **extra)
    if own and config.task == "sentence-similarity":
        for part, parameter in model.named_parameters():
            if "pooler" in part:
                parameter.requires_grad = False  # embeddings are means over tokens
    return model


def json_config(name: str) -> dict[str, Any]:
    """The raw configuration of a folder or hub id."""
    return transformers.PreTrainedConfig.get_config_dict(name)[0]


class Masking:
    """Masks drawn in the training step, where the step's seed decides them, not ahead of it in the loader."""

    def __init__(self, config: FineTuneConfig, processor: Any) -> None:
        self.task, self.draw = config.task, None
        if config.task == "masked-lm":
            self.draw = DataCollatorForLanguageModeling(processor, mlm_probability=config.mask_fraction)

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch with the labels of a language model."""
        if self.task == "causal-lm":
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            return {**batch, "labels": batch["input_ids"].masked_fill(mask == 0, -100)}
        if self.draw is None:
            return dict(batch)
        device = batch["input_ids"].device
        ids, labels = self.draw.torch_mask_tokens(batch["input_ids"].cpu().clone())
        return {**batch, "input_ids": ids.to(device), "labels": labels.to(device)}


def batches_of(loader: Any, progress: Progress) -> Iterator[tuple[int, Any]]:
    """Epoch and batch, without end, from where the progress is; the order of an epoch depends on the seed alone."""
    epoch, seen = 0, 0
    while True:
        loader.set_epoch(epoch)
        before = seen
        for batch in loader:
            seen += 1
            if seen > progress.batches:
                progress.batches = seen
                yield epoch, batch
        if seen == before:
            raise ValueError("train gave no batch; it has fewer rows than processes")
        epoch += 1


class ByLength(LengthGroupedSampler):
    """Batches of rows of similar length, in an order that depends on the seed and the epoch alone."""

    def __init__(self, batch_size: int, rows: Any, seed: int) -> None:
        super().__init__(batch_size, lengths=[len(row) for row in rows])
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Draw another order."""
        self.generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)


@dataclasses.dataclass
class Stage:
    """One stage's prepared parts."""

    name: str
    model: Any
    plain: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    test: Any
    steps: int
    every: int  # steps between two evaluations


def set_up(run: Run, name: str, model: Any, teacher: Any, data: Data) -> Stage:
    """Choose what trains in a stage, and prepare it for the devices there are."""
    config, accelerator = run.config, run.accelerator
    sampler = None
    if config.group_by_length:
        sampler = ByLength(config.batch_size * accelerator.num_processes, data.train["input_ids"], config.seed)
    shuffle = None if config.streaming or sampler else True
    loader = DataLoader(data.train, config.batch_size, shuffle, sampler, collate_fn=data.collate)
    test = DataLoader(data.evaluation, config.eval_batch_size, collate_fn=data.collate)
    head = head_names(model, config)
    if name != "task":
        chosen = {part for part, parameter in model.named_parameters() if parameter.requires_grad}
        restore(model, of_stage(name, chosen, head, same_logits(model, teacher, data)))
    optimizer = torch.optim.AdamW(groups_of(model, config, head, run.console))
    if config.gradient_checkpointing:
        new = getattr(model, "activation_checkpointing_enable", None)  # its name in later releases
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if accelerator.distributed_type == DistributedType.FSDP:  # Accelerate's own choice fails on embeddings
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = block_classes(base_of(model))
    wrapped, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    per_epoch = None if config.streaming else -(-len(loader) // config.accumulation)
    steps = {"match": config.match_steps, "distill": config.distill_steps, "task": config.max_steps}[name]
    if steps < 1:
        steps = max(1, round(config.epochs * (per_epoch or 1)))
    scheduler = get_scheduler(config.schedule, optimizer, round(config.warmup * steps), steps)
    accelerator.register_for_checkpointing(scheduler)
    plain = base_of(accelerator.unwrap_model(wrapped, keep_torch_compile=False))
    every = config.eval_steps or per_epoch or steps
    return Stage(name, wrapped, plain, optimizer, scheduler, loader, test, steps, every)


def train_batch(run: Run, stage: Stage, teacher: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro-batch, and the optimiser's step after the last of them; the losses."""
    config, accelerator = run.config, run.accelerator
    with accelerator.accumulate(stage.model):
        if stage.name == "match":
            loss, parts = match_loss(stage.model, stage.plain, teacher, batch)
        elif stage.name == "distill":
            loss, parts = distill_loss(stage.model, teacher, batch, config.temperature)
        else:
            loss, parts = task_loss(stage.model, stage.plain, teacher, batch, config)
        accelerator.backward(loss)
        if accelerator.sync_gradients and config.clip:
            accelerator.clip_grad_norm_(stage.model.parameters(), config.clip)
        stage.optimizer.step()
        stage.optimizer.zero_grad()
    return {"loss": loss.detach()} | {name: value.detach() for name, value in parts.items()}


def train_stage(run: Run, name: str, model: Any, teacher: Any, data: Data, masking: Masking) -> Any:
    """One stage, from its start or from the progress of a resumed run; the plain model, at its best after task."""
    config, accelerator, progress = run.config, run.accelerator, run.progress
    chosen = {part for part, parameter in model.named_parameters() if parameter.requires_grad}
    stage = set_up(run, name, model, teacher, data)
    if progress.step:
        accelerator.load_state(str(run.work / f"checkpoint-{progress.stage}-{progress.step}"))
    losses: list[dict[str, torch.Tensor]] = []
    source = batches_of(stage.loader, progress)
    with tqdm(total=stage.steps, initial=progress.step, desc=name) as bar:  # closed before an error is told
        while progress.step < stage.steps and not (config.patience and progress.waited >= config.patience):
            stage.model.train()
            epoch, batch = next(source)
            place = progress.batches * accelerator.num_processes + accelerator.process_index
            torch.manual_seed(config.seed + 1_000_003 * (progress.stage + 1) + place)
            losses.append(train_batch(run, stage, teacher, masking(batch)))
            if not accelerator.sync_gradients:
                continue
            stage.scheduler.step()
            progress.step += 1
            bar.update()
            last = progress.step == stage.steps
            if last or progress.step % config.log_steps == 0:
                log(run, name, epoch, losses, stage.scheduler.get_last_lr()[0], bar)
            if last or progress.step % stage.every == 0:
                better = name == "task" and judge(run, evaluate_model(run, stage.model, stage.test, masking))
                run.save_checkpoint(better)
    if name == "task" and progress.best_checkpoint:
        accelerator.load_state(str(run.work / progress.best_checkpoint))
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        plain = gathered(run, stage.model, data)
    else:
        plain = accelerator.unwrap_model(stage.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    restore(plain, chosen)
    progress.stage, progress.step, progress.batches = progress.stage + 1, 0, 0
    return plain


def check_sharding(accelerator: Accelerator, model: Any, config: FineTuneConfig) -> None:
    """Refuse what cannot be trained in parts, before anything is.

    Raises:
        ValueError: several stages under DeepSpeed; parameters that modules share, embeddings aside, under FSDP.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED and len(config.stages) > 1:
        raise ValueError(f"DeepSpeed takes one stage a run, each from the last one's --output; got {config.stages}")
    if accelerator.distributed_type == DistributedType.FSDP and (shared := shared_parameters(base_of(model))):
        raise ValueError(f"FSDP cannot split {', '.join(shared)}, which modules share; use accelerate/multi_gpu.yaml")


def gathered(run: Run, model: Any, data: Data) -> Any:
    """A plain model, whole on every process, with the weights that the processes trained in parts."""
    config, file = run.config, run.work / "weights.pt"
    weights = run.accelerator.get_state_dict(model)
    if run.accelerator.is_main_process:
        with writing(run.work):
            torch.save(weights, file)
    run.accelerator.wait_for_everyone()
    plain = choose_parameters(load_model(config, config.model, data.labels, own=True), config)
    plain.load_state_dict(torch.load(file, weights_only=True))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        file.unlink()
    return plain


def base_of(model: Any) -> Any:
    """The Transformers model inside what peft made."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def same_logits(model: Any, teacher: Any, data: Data) -> bool:
    """Whether the teacher's logits can be aimed at."""
    row = next(iter(data.train))
    batch = {name: value for name, value in data.collate([row]).items() if name != "labels"}
    with torch.no_grad():
        first, second = (
            one.eval()(**{name: value.to(one.device) for name, value in batch.items()}) for one in (model, teacher)
        )
    return comparable(first, second)


def log(run: Run, stage: str, epoch: int, losses: list[dict[str, torch.Tensor]], rate: float, bar: Any) -> None:
    """Means of the losses since the last line, over processes, to the bar, the history and the trackers."""
    progress = run.progress
    means = {}
    for name in losses[0]:
        mean = torch.stack([parts[name].float() for parts in losses]).mean()
        means[name] = run.accelerator.reduce(mean, "mean").item()
    losses.clear()
    progress.history.append({"stage": stage, "step": progress.step, "epoch": epoch, "learning_rate": rate, **means})
    run.accelerator.log({f"{stage}/{name}": value for name, value in means.items()}, step=progress.step)
    bar.set_postfix({name: f"{value:.4f}" for name, value in means.items()})


def judge(run: Run, metrics: dict[str, float]) -> bool:
    """Note an evaluation; whether it is the best so far."""
    progress, (name, more) = run.progress, run.config.ranked_by
    if name not in metrics:
        raise ValueError(f"--best_metric {name} is not measured; there is {', '.join(metrics)}")
    value = metrics[name] if more else -metrics[name]
    better = progress.best is None or value > progress.best
    progress.waited = 0 if better else progress.waited + 1
    if better:
        progress.best = value
    progress.history.append({"stage": "evaluation", "step": progress.step, **metrics})
    run.accelerator.log({f"evaluation/{key}": number for key, number in metrics.items()}, step=progress.step)
    run.console.print(f"step {progress.step}: " + ", ".join(f"{key} {number:.4f}" for key, number in metrics.items()))
    return better


def metric_of(name: str) -> Any:
    """A metric of `evaluate`: the script in recipes/metrics, else the hub's."""
    script = HERE / "metrics" / f"{name}.py"
    try:
        return evaluate.load(str(script) if script.is_file() else name)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"--metrics {name} is neither in recipes/metrics nor on the hub") from error
    except ImportError as error:
        raise ValueError(f"metric {name} needs more packages: pip install '.[recipes]'; {error}") from error


@torch.no_grad()
def evaluate_model(run: Run, model: Any, loader: Any, masking: Masking) -> dict[str, float]:
    """Loss and metrics on the evaluation rows, the same on every process."""
    config, accelerator = run.config, run.accelerator
    model.eval()
    found: list[torch.Tensor] = []
    known: list[torch.Tensor] = []
    total = torch.zeros(2, device=accelerator.device)
    for number, batch in enumerate(loader):
        torch.manual_seed(config.seed * 1000 + number)
        batch = masking(batch)
        labels = batch["labels"]
        if config.task == "sentence-similarity":
            guess = similarity(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), batch)
            loss, weight = torch.nn.functional.mse_loss(guess, labels.float()), len(labels)
        else:
            output = model(**batch)
            loss, weight = output.loss, int((labels != -100).sum())
            guess = output.logits.squeeze(-1) if config.task == "regression" else output.logits.argmax(-1)
        total += torch.stack([loss.float() * weight, torch.tensor(float(weight), device=total.device)])
        if config.task not in ("masked-lm", "causal-lm"):
            if guess.ndim > 1:  # tags
                guess, labels = (accelerator.pad_across_processes(x, 1, -100) for x in (guess, labels))
            guess, labels = accelerator.gather_for_metrics((guess, labels))
            found.append(guess[labels != -100].float().cpu())
            known.append(labels[labels != -100].float().cpu())
    total = accelerator.reduce(total, "sum")
    metrics: list[dict[str, float]] = [{"loss": (total[0] / total[1]).item()}]
    if config.task in ("masked-lm", "causal-lm"):
        metrics[0]["perplexity"] = float(torch.tensor(metrics[0]["loss"]).exp())
    elif accelerator.is_main_process:
        kind = float if config.task in ("regression", "sentence-similarity") else int
        values = {"predictions": torch.cat(found).tolist(), "references": torch.cat(known).tolist()}
        values = {name: [kind(value) for value in column] for name, column in values.items()}
        for name in config.metrics or METRICS[config.task]:
            metrics[0] |= {key: float(value) for key, value in metric_of(name).compute(**values).items()}
    broadcast_object_list(metrics)
    return metrics[0]


def save(run: Run, model: Any, processor: Any, data: Data) -> dict[str, Any]:
    """The trained model in its folder, with processor, report and card; a converted one is proven to reload."""
    config, progress = run.config, run.progress
    if config.trains == "primal+lora":
        if config.save_adapter:
            adapter = run.work / "adapter"
            with writing(run.work, adapter):
                model.save_pretrained(adapter)
        model = model.merge_and_unload()
    evaluations = [row for row in progress.history if row["stage"] == "evaluation"]
    name, more = config.ranked_by
    best = max(evaluations, key=lambda row: row[name] if more else -row[name]) if evaluations else {}
    packages = ("hf-primal", "torch", "transformers", "accelerate", "datasets", "peft")
    report = {
        "schema_version": 1,
        "metrics": {key: value for key, value in best.items() if key not in ("stage", "step")},
        "best_step": best.get("step"),
        "config": dataclasses.asdict(config),
        "command": run.command,
        "rows": {"train": None if config.streaming else len(data.train), "evaluation": len(data.evaluation)},
        "processes": run.accelerator.num_processes,
        "device": run.accelerator.device.type,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "history": progress.history,
    }
    with writing(run.work), staged(run.folder) as staging:
        model.save_pretrained(staging)
        processor.save_pretrained(staging)
        copy_sentence_modules(config.model, staging)
        (staging / REPORT).write_text(json.dumps(report, indent=2) + "\n")
        if getattr(model.config, "primal_layers", None):
            write_card(run, model, report, staging)
            row = data.collate([next(iter(data.evaluation))])
            inputs = {key: value.to(model.device) for key, value in row.items() if key != "labels"}
            verify_reload(staging, model.eval(), inputs)
    return report


def write_card(run: Run, model: Any, report: dict[str, Any], folder: Path) -> None:
    """The model card of a fine-tuned converted model."""
    config = run.config
    shown = ("epochs", "max_steps", "batch_size", "accumulation", "learning_rate", "primal_learning_rate", "schedule")
    shown += ("warmup", "weight_decay", "mixed_precision", "max_length", "seed")
    card = finetuned_card(
        FineTuning(
            title=config.push_to_hub or run.folder.name,
            auto_class=TASKS[config.task],
            base_model=config.model,
            task=config.task,
            dataset=config.train,
            metrics=report["metrics"],
            teacher_metrics=None,
            trained=config.trains,
            stages=config.stages,
            primal_layers=model.config.primal_layers,
            hyperparameters={name: getattr(config, name) for name in shown}
            | {"ksvd_weight": model.config.ksvd_weight, "processes": report["processes"]},
            command=run.command,
            versions=report["versions"],
            license_id=license_of(config.model),
        )
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def main(argv: list[str]) -> None:
    """One run."""
    config = read_config(argv)
    run = Run(config, shlex.join(["accelerate", "launch", "recipes/finetune.py", *argv]))
    accelerator = run.accelerator
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if accelerator.is_main_process:  # what is wrong with these is told before any work
        for name in config.metrics:
            metric_of(name)
        if config.push_to_hub:
            open_hub(config.push_to_hub, config.private)
    run.prepare_folders()
    set_seed(config.seed)
    processor = load_processor(config)
    with accelerator.main_process_first():
        data = load_data(config, processor)
    model = choose_parameters(load_model(config, config.model, data.labels, own=True), config)
    check_sharding(accelerator, model, config)
    teacher = None
    if config.teacher:
        teacher = load_model(config, config.teacher, data.labels, own=False).eval().to(accelerator.device)
        teacher.requires_grad_(False)
    if config.trackers:
        flat = {key: value for key, value in dataclasses.asdict(config).items() if isinstance(value, int | float | str)}
        accelerator.init_trackers("finetune", config=flat)
    masking = Masking(config, processor)
    for stage in config.stages[run.progress.stage :]:
        model = train_stage(run, stage, model, teacher, data, masking)
    if accelerator.is_main_process:
        save(run, model, processor, data)
        run.console.print(f"Saved: [bold]{run.folder}[/bold]", soft_wrap=True)
        if config.push_to_hub:
            address = push(run.folder, config.push_to_hub, private=config.private)
            run.console.print(f"Published: {address}", soft_wrap=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        if (line := explain(error)) is None:
            raise
        print(f"finetune: {line}", file=sys.stderr)
        sys.exit(2)
