"""Which parameters train in `finetune.py`, in which groups, under LoRA or not."""

import re
from typing import Any

import torch
from finetune_config import FineTuneConfig
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_primal.modeling.modeling_primal import self_attention_modules

OWN_HEADS = ("masked-lm", "causal-lm", "sentence-similarity")  # tasks whose head is trained already, or none


def is_primal(name: str) -> bool:
    """Whether a parameter of this name belongs to a Primal-Attention layer."""
    return "primal" in name.split(".")


def head_names(model: Any, config: FineTuneConfig) -> set[str]:
    """Parameters outside the backbone of a model whose head is new."""
    if config.task in OWN_HEADS:
        return set()
    inside = {id(parameter) for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in inside}


def replaced_blocks(model: Any) -> list[str]:
    """Names of the blocks that hold the replaced attention modules, such as encoder.layer.4."""
    names = [name.split(".") for name, module in self_attention_modules(model) if hasattr(module, "primal")]
    return [".".join(parts[: 1 + max(i for i, part in enumerate(parts) if part.isdigit())]) for parts in names]


def choose_parameters(model: Any, config: FineTuneConfig) -> Any:
    """Leave a gradient to the chosen parameters alone; wraps the model for LoRA.

    Raises:
        ValueError: nothing of the kind in this model.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    head, blocks = head_names(model, config), replaced_blocks(model)
    if config.trains != "all" and not blocks:
        raise ValueError(f"--trains {config.trains}: {config.model} has no Primal-Attention layer; use all")
    if config.trains == "primal+lora":
        from peft import LoraConfig, get_peft_model

        modules = {name.split(".")[0] for name in head}
        linear = "all-linear" if not config.lora_targets else config.lora_targets
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=2 * config.lora_rank,
            target_modules=linear,
            exclude_modules=[*modules, *(name.removesuffix(".weight") for name in frozen)] or None,
            modules_to_save=["primal", *modules],
        )
        return get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen and (
            config.trains == "all"
            or name in head
            or is_primal(name)
            or (config.trains == "replaced-layers" and any(name.startswith(f"{block}.") for block in blocks))
        )
    return model


def block_classes(model: Any) -> list[str]:
    """Class names of the blocks that hold the self-attentions, such as BertLayer: the outermost that are numbered."""
    blocks = {re.match(r".*?\.\d+(?=\.)|", name)[0] for name, _ in self_attention_modules(model)}
    return sorted({type(model.get_submodule(block)).__name__ for block in blocks})


def shared_parameters(model: Any) -> list[str]:
    """Names of the parameters that several modules share; the two embeddings count as one module."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    found: dict[int, dict[int, str]] = {}
    for name, module in model.named_modules():
        owner = embeddings[0] if module in embeddings else module
        for part, parameter in module.named_parameters(prefix=name, recurse=False):
            found.setdefault(id(parameter), {})[id(owner)] = part
    return [next(iter(owners.values())) for owners in found.values() if len(owners) > 1]


def of_stage(stage: str, names: set[str], head: set[str], compares_logits: bool) -> set[str]:
    """Which of the chosen parameters a stage's loss reaches; the others would stop DistributedDataParallel.

    Args:
        stage: match, distill or task.
        names: all that may train.
        head: those of a new head.
        compares_logits: the teacher's logits are of the same shape.
    """
    if stage == "task":
        return names
    names = {name for name in names if not name.endswith(".Lambda")}  # it is in the KSVD loss alone
    if stage == "match":
        return {name for name in names if is_primal(name)}
    unused = head if not compares_logits else set()
    return {name for name in names if name not in unused and (compares_logits or "pooler" not in name)}


def groups_of(model: nn.Module, config: FineTuneConfig, head: set[str], console: Console) -> list[dict[str, Any]]:
    """Optimiser groups with their learning rates; the table of them is printed."""
    kinds: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            new = any(name.endswith(own.split(".", 1)[-1]) and own.split(".")[0] in name.split(".") for own in head)
            kind = (
                "Primal-Attention" if is_primal(name) else "head" if new else "LoRA" if "lora_" in name else "backbone"
            )
            decays = kind != "Primal-Attention" and parameter.ndim > 1
            kinds.setdefault((kind, decays), []).append(parameter)
    rates = {"Primal-Attention": config.primal_learning_rate, "head": config.head_learning_rate}
    table = Table("what trains", "tensors", "parameters", "learning rate", "weight decay")
    groups = []
    for (kind, decays), parameters in sorted(kinds.items(), key=lambda item: item[0]):
        rate = rates.get(kind) or config.learning_rate
        decay = config.weight_decay if decays else 0.0
        groups.append({"params": parameters, "lr": rate, "weight_decay": decay})
        count = sum(parameter.numel() for parameter in parameters)
        table.add_row(kind, str(len(parameters)), f"{count:,}", f"{rate:g}", f"{decay:g}")
    total = sum(parameter.numel() for parameter in model.parameters())
    kept = total - sum(p.numel() for p in model.parameters() if p.requires_grad)
    table.add_row("frozen", "", f"{kept:,}", "", "")
    console.print(table)
    if not groups:
        raise ValueError(f"--trains {config.trains}: nothing to train in this stage")
    return groups


def restore(model: nn.Module, names: set[str]) -> None:
    """Leave a gradient to the parameters of these names alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def comparable(first: Any, second: Any) -> bool:
    """Whether two outputs have logits of one shape."""
    one, two = getattr(first, "logits", None), getattr(second, "logits", None)
    return isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape
