"""Generation with constant state: what a replaced causal layer keeps instead of the keys and values of all tokens.

Its running sums, and the keys and values of its window. The layer of the model's own cache that would have held the
keys and values is given a class of ours, so every cache that Transformers builds (and every name that it gives to the
argument) is served; all other layers of the cache stay as they are.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

State = TypeVar("State", bound="PrimalState")
SUPPORTED = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class PrimalState:
    """The state of one replaced layer, mixed into the class of the cache layer whose place it takes.

    Attributes:
        state: tensors of constant shapes, as `PrimalAttention` made them; empty at the start.
        calls: state before, layer and inputs of the calls since the last crop, while recording.
        column: which key of the attention mask the first token of the current call is.
        cumulative_length: tokens seen, an int, or a scalar tensor for static caches.
    """

    is_primal = True
    is_croppable = True
    supports_early_init = False
    state: dict[str, Tensor]
    calls: list[tuple[dict[str, Tensor], nn.Module, tuple[Any, ...]]]
    column: int | Tensor
    cumulative_length: int | Tensor

    @classmethod
    def in_place_of(cls: type[State], layer: Any) -> State:
        """An empty one, in the place of a cache layer that has not been used."""
        made = cls.__new__(cls)
        vars(made).update({"cumulative_length": 0, **vars(layer)})
        made.state, made.calls, made.column, made.record_past = {}, [], 0, False
        return made

    def __repr__(self) -> str:
        """How many bytes the state takes, whatever the number of tokens."""
        return f"{type(self).__name__}({state_bytes(self)} bytes for {int(self.get_seq_length())} tokens)"

    def get_seq_length(self) -> int | Tensor:
        """Tokens seen."""
        return getattr(self, "cumulative_length_int", self.cumulative_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens; their keys and values alone go on to the attention function."""
        tokens, seen = key_states.shape[-2], self.get_seq_length()
        span: int | None = getattr(self, "sliding_window", getattr(self, "max_cache_len", 0))
        dropped = max(seen - (span or 0) + 1, 0) if getattr(self, "is_sliding", False) else 0
        self.column = (seen.clone() if isinstance(seen, Tensor) else seen) - dropped
        if isinstance(self.cumulative_length, Tensor):
            self.cumulative_length = self.cumulative_length.to(key_states.device).add_(tokens)
        else:
            self.cumulative_length += tokens
        if hasattr(self, "cumulative_length_int"):
            self.cumulative_length_int += tokens
        self.batch_size = self.max_batch_size = len(key_states)  # what a cache that is used again is asked for
        return key_states, value_states

    def begin(self) -> dict[str, Tensor]:
        """The state for the layer to bring up to date; ours stays as it is until `commit`."""
        return dict(self.state)

    def commit(self, state: dict[str, Tensor], primal: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take the state after a call; while recording, remember how to go back to any token of the call."""
        if self.record_past:
            self.calls.append((self.begin(), primal, inputs))
        self.write(state)

    def write(self, state: dict[str, Tensor]) -> None:
        """Hold a state; in place for static caches, whose compiled forward knows the addresses."""
        if not isinstance(self.cumulative_length, Tensor):
            self.state = state
        elif not self.state:
            self.state = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in self.state.values():
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(tensor)
        else:
            for name, tensor in self.state.items():
                tensor.copy_(state.get(name, torch.zeros_like(tensor)))

    def activate_past_recording(self, **kwargs: Any) -> None:
        """Remember the calls until the next `crop`; any token of theirs can be gone back to, whatever 5.25 asks for."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens.

        Args:
            tokens_to_remove: their number, as 0 or a negative int; up to transformers 5.14 also the length to keep.

        Raises:
            RuntimeError: more tokens than were recorded since the last crop.
        """
        left = remove = int(self.get_seq_length()) - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        while left > 0:
            if not self.calls:
                raise RuntimeError(
                    f"crop({tokens_to_remove}) goes back further than the recorded calls; a replaced layer keeps a "
                    "running state: call activate_past_recording() on the cache before the forward to take back"
                )
            state, primal, inputs = self.calls.pop()
            kept = max(inputs[0].shape[-2] - left, 0)
            left -= inputs[0].shape[-2] - kept
            if kept:
                query, key, value, valid, *rest = inputs
                valid = valid if valid is None else valid[:, :kept]
                with torch.no_grad():
                    primal(*(x[:, :, :kept] for x in (query, key, value)), valid, *rest, state)
            self.write(state)
        self.calls.clear()
        self.cumulative_length -= remove
        if hasattr(self, "cumulative_length_int"):
            self.cumulative_length_int -= remove

    def reset(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.write({})
        self.cumulative_length -= self.cumulative_length
        if hasattr(self, "cumulative_length_int"):
            self.cumulative_length_int = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the states of the given sequences, for beam search."""
        self.state = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in self.state.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the state of each sequence."""
        self.state = {name: x.repeat_interleave(repeats, dim=0) for name, x in self.state.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the states of the given sequences."""
        self.state = {name: x[indices] for name, x in self.state.items()}


def primal_layer_class(base: type) -> type[PrimalState]:
    """`Primal<base>`: the cache layer class with our state in it; the same class for every call."""
    name = f"Primal{base.__name__}"
    if name not in globals():
        globals()[name] = type(name, (PrimalState, base), {"__module__": __name__})
    return globals()[name]


def adopt(cache: Any, index: int) -> PrimalState | None:
    """Make layer `index` of a model's cache keep our state; None when the object is no cache.

    Raises:
        ValueError: a cache whose layer already holds keys, or of a kind that is not supported.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        return None
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if getattr(layer, "is_primal", False):
        return layer
    kind = type(layer)
    if kind not in SUPPORTED:
        raise ValueError(
            f"a replaced layer cannot generate with a {kind.__name__}; use the default cache or a static one"
        )
    if layer.is_initialized and layer.get_seq_length() > 0:
        raise ValueError(
            f"layer {index} is replaced, but the cache given holds its keys of {int(layer.get_seq_length())} tokens "
            "already; start from an empty cache"
        )
    made = primal_layer_class(kind).in_place_of(layer)
    cache.layers[index] = made  # type: ignore[call-overload]
    return made


def remember_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a replaced attention module: find the cache among its arguments, whatever its name."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    module.primal_cache = adopt(found[0], module.layer_idx) if found else None  # type: ignore[assignment,arg-type]


def state_bytes(cache: Any) -> int:
    """Bytes of tensors that a cache, or one layer of it, holds."""
    if isinstance(cache, EncoderDecoderCache):
        return state_bytes(cache.self_attention_cache) + state_bytes(cache.cross_attention_cache)
    if isinstance(cache, Cache):
        return sum(state_bytes(layer) for layer in cache.layers)
    held = cache.state.values() if isinstance(cache, PrimalState) else (cache.keys, cache.values)
    return sum(tensor.nbytes for tensor in held if tensor is not None)
