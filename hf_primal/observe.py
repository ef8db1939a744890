"""Attention through the interface: what the chosen layers of the teacher see and answer, batch by batch.

Memory: the states of the batches that fit a limit are kept, the others are computed again at each pass.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from hf_primal.modeling.primal_band import in_sight
from hf_primal.modeling.primal_interface import key_padding, relative_bias, sight_of, visible


@dataclass(frozen=True)
class States:
    """One call of one layer. Letters: B batch, H query heads, G key/value heads, N tokens, d head dim."""

    query: Tensor  # (B, H, N, d)
    key: Tensor  # (B, G, N, d)
    value: Tensor  # (B, G, N, d)
    output: Tensor  # (B, H, N, d), what the teacher's softmax attention answered
    valid: Tensor  # (B, N) bool
    scaling: float
    causal: bool = False
    horizon: int | None = None  # of a sliding window, as for `PrimalAttention.forward`
    bias: Tensor | None = None  # (H, 2N - 1), likewise

    def inputs(self) -> dict[str, Any]:
        """The arguments of `PrimalAttention.forward`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "output"}

    def sight(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Query minus key position, (R, N), and which keys these valid rows see, (B, R, N)."""
        offset = rows[:, None] - torch.arange(self.query.shape[-2], device=rows.device)
        seen = in_sight(offset, self.causal, self.horizon)
        return offset, seen & self.valid[:, None, :] & self.valid[:, rows, None]

    def logits(self, q: Tensor, k: Tensor, offset: Tensor) -> Tensor:
        """Q . k with the position bias, (B, H, R, N), for scaled queries (B, H, R, d) at these offsets."""
        scores = q @ k.mT
        return scores if self.bias is None else scores + self.bias[:, self.bias.shape[-1] // 2 - offset]

    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


UNKNOWN_TERMS = {"softcap": "caps its scores", "s_aux": "has attention sinks"}


def _refuse_unlike_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]
) -> None:
    """Refuse what the layer cannot stand for: cross-attention, odd head dims, terms that it does not know."""
    kind = type(module).__name__
    for name, what in UNKNOWN_TERMS.items():
        if options.get(name) is not None:
            raise ValueError(f"{kind} {what} ({name}), which a replaced layer does not do")
    if not query.shape[2:] == key.shape[2:] == value.shape[2:]:
        raise ValueError(
            f"{kind} has queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)}; "
            "their lengths and head dims must be the same"
        )
    bias = options.get("position_bias")
    if isinstance(bias, Tensor):
        if sight_of(module, options)[0]:
            raise ValueError(
                f"{kind} adds a position bias in a decoder, which a constant generation state cannot follow; "
                "replace layers of the encoder alone"
            )
        positions = torch.arange(query.shape[-2], device=query.device)
        known = relative_bias(bias)
        assert known is not None
        if len(bias) > 1 or not torch.equal(bias[0], known[:, positions - positions[:, None] + len(positions) - 1]):
            raise ValueError(f"{kind} adds a bias that depends on more than the distance of two tokens")


def _refuse_unlike_mask(states: States, mask: Tensor, kind: str) -> None:
    """Refuse a mask that is anything but padding, causality and the sliding window that the call tells."""
    if mask.ndim != 4 or mask.shape[-2] != states.query.shape[-2]:
        return
    _, seen = states.sight(torch.arange(states.query.shape[-2], device=mask.device))
    shown = visible(mask)
    if ((shown != seen[:, None]) & states.valid[:, None, :, None]).any():
        raise ValueError(f"{kind} has a mask that is not padding, causality or a sliding window; it cannot be replaced")
    if mask.is_floating_point() and (mask.masked_fill(~shown, 0.0) != 0).any():
        raise ValueError(f"{kind} adds a bias to its attention through the mask, which a replaced layer cannot read")


def _observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Softmax attention as the teacher does it, reported to the module's observer."""
    _refuse_unlike_attention(module, query, key, value, kwargs)
    causal, horizon = sight_of(module, kwargs)
    valid = key_padding(attention_mask, key.shape[-2], 0, horizon)
    if valid is None:
        valid = torch.ones(1, key.shape[-2], dtype=torch.bool, device=key.device)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scaling, bias = kwargs.get("scaling"), relative_bias(kwargs.get("position_bias"))
    states = States(
        query.detach(),
        key.detach(),
        value.detach(),
        output.detach().transpose(1, 2),
        valid.expand(query.shape[0], -1),
        scaling if isinstance(scaling, float) else query.shape[-1] ** -0.5,
        causal,
        horizon,
        None if bias is None else bias.detach(),
    )
    if attention_mask is not None:
        _refuse_unlike_mask(states, attention_mask, type(module).__name__)
    module._observer(states)  # type: ignore[operator]
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


class AllSeenError(Exception):
    """Ends a forward of the teacher whose chosen layers have all been seen."""


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
        self.once = False  # whether a forward calls each layer once, known after the first

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

        def take(index: int, states: States) -> None:
            seen[index].append(states)
            if self.once and all(seen.values()):
                raise AllSeenError  # the layers behind, and a head over the vocabulary, are spared

        training = self.model.training
        self.model.eval()
        try:
            with suppress(AllSeenError), torch.no_grad(), observing(self.modules, take):
                self.model(**self.batches[position])
        finally:
            self.model.train(training)
        for index, calls in seen.items():
            if not calls:
                raise ValueError(
                    f"layer {index} was never called through the attention interface; it cannot be replaced"
                )
        self.once = all(len(calls) == 1 for calls in seen.values())
        size = sum(states.nbytes() for calls in seen.values() for states in calls)
        if size <= self.room:
            self.kept[position] = seen
            self.room -= size
        return seen

    def __iter__(self) -> Iterator[dict[int, list[States]]]:
        """One pass over the calibration data."""
        return (self[position] for position in range(len(self)))


def with_decoder_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch, and for an encoder-decoder that got token ids alone the same tokens, shifted, for its decoder."""
    complete = dict(batch)
    wanted = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if wanted and "input_ids" in batch and not {"decoder_input_ids", "labels"} & set(batch):
        start = getattr(model.config, "decoder_start_token_id", None)
        first = torch.full_like(batch["input_ids"][:, :1], model.config.pad_token_id or 0 if start is None else start)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        complete["decoder_input_ids"] = torch.cat((first, batch["input_ids"][:, :-1]), 1)
        complete["decoder_attention_mask"] = torch.cat((torch.ones_like(mask[:, :1]), mask[:, :-1]), 1)
    return complete
