"""The attention function of a replaced layer, in the form that Transformers calls, and what it reads off the call.

Letters: B batch, H query heads, G key/value heads, N tokens, d head dim.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def sight_of(module: nn.Module, options: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether a call of an attention function is causal, and its sliding window, as sdpa attention understands it."""
    causal = options.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal, options.get("sliding_window")


def relative_bias(position_bias: Tensor | None) -> Tensor | None:
    """(1, H, N, N) that depends on key minus query position alone, as the vector (H, 2N - 1) of its values."""
    if position_bias is None:
        return None
    return torch.cat((position_bias[0, :, -1], position_bias[0, :, 0, 1:]), -1)


def visible(mask: Tensor) -> Tensor:
    """Where a mask lets a query see a key, bool of the mask's shape: bool masks keep True, float ones are additive."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def key_padding(mask: Tensor | None, tokens: int, start: int | Tensor = 0, horizon: int | None = None) -> Tensor | None:
    """(B, N) bool, True for tokens, from whatever mask an attention module hands over; None when nothing is hidden.

    A token is padding when it may not see itself, which is right for full, causal and sliding masks alike.

    Args:
        mask: (B, keys), or (B, 1, N or 1, keys), bool or additive.
        tokens: N, queries.
        start: which key the first query is.
        horizon: of the layer.

    Raises:
        ValueError: a mask that keeps the tokens of one row apart (packed sequences), or that is no tensor. Masks are
            not looked into while compiling.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"a replaced layer cannot read a {type(mask).__name__} mask; use sdpa or eager attention")
    keep = visible(mask) if mask.is_floating_point() or mask.dtype == torch.bool else mask.bool()
    columns = start + torch.arange(tokens, device=mask.device)
    if keep.ndim == 2:
        return keep[:, columns]
    keep = keep[:, 0]
    if keep.shape[-2] == 1 < tokens:
        return keep[:, 0, columns]
    rows = torch.arange(tokens, device=mask.device)
    valid = keep[:, rows, columns]
    if tokens > 1 and not torch.compiler.is_compiling():
        apart = valid[:, 1:] & valid[:, :-1] & ~keep[:, rows[1:], columns[:-1]]
        if horizon is None:
            first, last = valid.int().argmax(-1), tokens - 1 - valid.flip(-1).int().argmax(-1)
            batch = torch.arange(len(keep), device=mask.device)
            corner = keep[batch, last, columns[first]] | ~valid.any(-1)
            apart = apart | ~corner[:, None]
        if apart.any():
            raise ValueError(
                "the mask keeps tokens of one row apart (packed sequences, or attention in chunks), which a replaced "
                "layer cannot do; give one sequence per row"
            )
    return valid


def primal_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of a replaced layer, in the form that Transformers calls.

    Args:
        module: the attention module; its child `primal` does the work, and `primal_cache` is the cache layer of this
            call, if there is one.
        query: (B, H, N, d).
        key: (B, G, N, d), of the new tokens alone.
        value: (B, G, N, d).
        attention_mask: as the model builds it for sdpa or eager attention.
        scaling: factor of q . k.
        **options: what the model tells attention functions; causality, sliding window and position bias are used.

    Returns:
        The output, (B, N, H, d), and None: there is no attention matrix.

    Raises:
        ValueError: keys of other tokens than the queries', or a mask as for `key_padding`.
    """
    causal, horizon = sight_of(module, options)
    cache: Any = getattr(module, "primal_cache", None)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"a replaced layer got {query.shape[-2]} queries and {key.shape[-2]} keys; past keys come from its own "
            "cache layer alone (no prefix tuning, no other cache)"
        )
    valid = key_padding(attention_mask, query.shape[-2], 0 if cache is None else cache.column, horizon)
    primal: Any = module.primal  # a PrimalAttention, or what wraps it
    inputs = (query, key, value, valid, scaling, causal, horizon, relative_bias(options.get("position_bias")))
    if cache is None:
        return primal(*inputs), None
    state = cache.begin()
    output = primal(*inputs, state)
    cache.commit(state, primal, inputs)
    del module.primal_cache
    return output, None
