"""Attention through the interface: what the chosen layers of the teacher see and answer, batch by batch.

Memory: the states of the batches that fit a limit are kept, the others are computed again at each pass.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from hf_primal.modeling.primal_attention import key_padding, visible


@dataclass(frozen=True)
class States:
    """One call of one layer. Letters: B batch, H query heads, N tokens, d head dim."""

    query: Tensor  # (B, H, N, d)
    key: Tensor  # (B, H, N, d), repeated to the query heads
    value: Tensor  # (B, H, N, d)
    output: Tensor  # (B, H, N, d), what the teacher's softmax attention answered
    valid: Tensor  # (B, N) bool
    scaling: float

    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _refuse_unlike_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]
) -> None:
    """Refuse what the layer cannot stand for: position biases, causal attention, cross-attention, odd head dims."""
    kind = type(module).__name__
    if options.get("position_bias") is not None:
        raise ValueError(f"{kind} adds a position bias to its attention, which is not supported yet")
    if options.get("is_causal", getattr(module, "is_causal", False)):
        raise ValueError(f"{kind} is causal, which is not supported yet")
    if not query.shape[2:] == key.shape[2:] == value.shape[2:]:
        raise ValueError(
            f"{kind} has queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)}; "
            "their lengths and head dims must be the same"
        )


def _observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Softmax attention as the teacher does it, reported to the module's observer."""
    _refuse_unlike_attention(module, query, key, value, kwargs)
    valid = key_padding(attention_mask, key.shape[-2])
    if valid is None:
        valid = torch.ones(1, key.shape[-2], dtype=torch.bool, device=key.device)
    elif attention_mask is not None and attention_mask.ndim == 4:
        unlike = visible(attention_mask) != valid[:, None, None, :]
        if (unlike & valid[:, None, :, None]).any():
            raise ValueError(
                f"{type(module).__name__} hides more than padding (it is causal or local), which is not supported yet"
            )
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    groups = query.shape[1] // key.shape[1]
    scaling = kwargs.get("scaling")
    module._observer(  # type: ignore[operator]
        States(
            query.detach(),
            key.detach().repeat_interleave(groups, 1),
            value.detach().repeat_interleave(groups, 1),
            output.detach().transpose(1, 2),
            valid.expand(query.shape[0], -1),
            scaling if isinstance(scaling, float) else query.shape[-1] ** -0.5,
        )
    )
    return output, None


AttentionInterface.register("primal_observed", _observed_attention)


@contextmanager
def observing(modules: Mapping[int, nn.Module], sink: Callable[[int, States], None]) -> Iterator[None]:
    """While inside, every call of the attention modules reports its states to `sink(index, states)`."""
    before = {index: module.config for index, module in modules.items()}
    try:
        for index, module in modules.items():
            config: Any = copy.copy(module.config)
            config._attn_implementation_internal = "primal_observed"
            module.config = config
            vars(module)["_observer"] = partial(sink, index)
        yield
    finally:
        for index, module in modules.items():
            module.config = before[index]
            vars(module).pop("_observer", None)


class Replay:
    """What the chosen layers see on the calibration data, as often as needed.

    Iterating gives, for each batch, the states of each layer: `{index: [states of each call]}` (a module that
    several layers share is called several times in one forward).

    Args:
        model: the teacher, left as it was found after each pass.
        modules: attention modules by layer index.
        batches: keyword arguments of the teacher's forward, tensors on its device.
        memory_limit: bytes of states kept between passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[int, nn.Module],
        batches: Sequence[Mapping[str, Tensor]],
        memory_limit: int,
    ) -> None:
        self.model, self.modules, self.batches, self.room = model, modules, batches, memory_limit
        self.kept: dict[int, dict[int, list[States]]] = {}

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[int, list[States]]:
        """States of one batch, kept or computed again.

        Raises:
            ValueError: the forward never called a chosen layer through the attention interface.
        """
        if position in self.kept:
            return self.kept[position]
        seen: dict[int, list[States]] = {index: [] for index in self.modules}
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), observing(self.modules, lambda index, states: seen[index].append(states)):
                self.model(**self.batches[position])
        finally:
            self.model.train(training)
        for index, calls in seen.items():
            if not calls:
                raise ValueError(
                    f"layer {index} was never called through the attention interface; it cannot be replaced"
                )
        size = sum(states.nbytes() for calls in seen.values() for states in calls)
        if size <= self.room:
            self.kept[position] = seen
            self.room -= size
        return seen

    def __iter__(self) -> Iterator[dict[int, list[States]]]:
        """One pass over the calibration data."""
        return (self[position] for position in range(len(self)))
