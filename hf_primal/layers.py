"""Which layers: "last4", "8-11", "0,3", "all" to indices of the self-attention modules, and whether they can go."""

import inspect
import re

from torch import nn
from transformers import PreTrainedModel

from hf_primal.modeling.modeling_primal import self_attention_modules


def parse_layers(text: str, count: int) -> list[int]:
    """Indices that a layer specification names.

    Args:
        text: "last4", "8-11", "0,3", a mix such as "0,8-11", or "all".
        count: self-attention layers of the model.

    Returns:
        Indices in 0..count-1, ascending, each once.

    Raises:
        ValueError: not understood, or outside the model.
    """
    ways = (
        f"use all, last1..last{count}, a range such as {max(count - 2, 0)}-{count - 1}, or a list such as 0,{count - 1}"
    )
    chosen: set[int] = set()
    for part in text.strip().split(","):
        last, span = re.fullmatch(r"last(\d+)", part.strip()), re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if part.strip() == "all":
            chosen.update(range(count))
        elif last and 1 <= int(last[1]) <= count:
            chosen.update(range(count - int(last[1]), count))
        elif span and int(span[1]) <= int(span[2] or span[1]) < count:
            chosen.update(range(int(span[1]), int(span[2] or span[1]) + 1))
        elif last or span:
            raise ValueError(f"--layers {text!r} is outside this model's layers 0..{count - 1}; {ways}")
        else:
            raise ValueError(f"--layers {text!r} is not understood; {ways}")
    return sorted(chosen)


def is_routed(module: nn.Module) -> bool:
    """Whether the module's attention goes through Transformers' attention interface."""
    return hasattr(module, "config") and "get_interface" in inspect.getsource(type(module).forward)


def choose_layers(model: PreTrainedModel, text: str) -> dict[int, tuple[str, nn.Module]]:
    """The self-attention modules to replace, by index in depth order.

    Args:
        model: a Transformers model.
        text: as for `parse_layers`.

    Returns:
        Index to (name in the model, module).

    Raises:
        ValueError: the model's attention cannot be replaced, or the layers do not exist.
    """
    kind = f"{type(model).__name__} (model type {model.config.model_type})"
    modules = self_attention_modules(model)
    if not modules or not all(is_routed(module) for _, module in modules):
        raise ValueError(
            f"{kind} cannot be converted: its attention does not go through Transformers' attention interface; "
            "families such as bert, roberta, electra, distilbert do"
        )
    depth = getattr(model.config, "num_hidden_layers", len(modules))
    if len(modules) < depth and text.strip() != "all":
        raise ValueError(
            f"{kind} shares {len(modules)} attention module(s) among its {depth} layers, so --layers {text!r} cannot "
            "be replaced alone; use --layers all"
        )
    return {index: modules[index] for index in parse_layers(text, len(modules))}
