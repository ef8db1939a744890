"""What a block cannot do without: multiply-adds and bytes, and how fast this machine does either."""

from typing import Any

import torch
from cells import seconds

from hf_primal import PrimalSettings

WIDTH, HEADS = 768, 12
FORMS: dict[str, tuple[PrimalSettings, tuple[str, ...]]] = {
    "ours, default": (PrimalSettings(), ()),
    "ours, window 0": (PrimalSettings(window=0), ()),
    "ours, folded": (PrimalSettings(), ("value",)),
    "ours, window 0, folded": (PrimalSettings(window=0), ("query", "key", "value")),
}


def operations(settings: PrimalSettings, folded: tuple[str, ...], dim: int = WIDTH // HEADS) -> dict[str, int]:
    """Multiply-adds per token and head (landmark features, non-causal), projections included.

    The band counts the keys in it; those that chunks meet beside them, to be dense, are the implementation's own.
    """
    features, rank, window = settings.features or dim, settings.rank, settings.window or 0
    width = HEADS * dim
    queries = features if "query" in folded else dim
    return {
        "projections": width * (2 * queries + 2 * dim),
        "features": 0 if "query" in folded else 2 * features * dim,
        "scores": 2 * features * rank,
        "band": (2 * window - 1) * 2 * dim if window else 0,
        "far field": 2 * rank * (dim + 1),
        "read-out": (0 if "value" in folded else dim * dim) + 2 * rank * dim,
    }


def least_bytes(settings: PrimalSettings, folded: tuple[str, ...], dim: int = WIDTH // HEADS) -> int:
    """Bytes per token and head in float32 that have to move where q, k, v and the output do not stay in the cache."""
    queries = (settings.features or dim) if "query" in folded else dim
    return 4 * (2 * dim + 2 * (2 * queries + 2 * dim))  # states in, result out; q, k, v and output written and read


def machine(tokens: int = 2048) -> dict[str, float]:
    """Multiply-adds a second of a projection, and bytes a second of a copy."""
    a, b = torch.randn(tokens, WIDTH), torch.randn(WIDTH, WIDTH)
    large = torch.randn(2**24)
    target = torch.empty_like(large)
    return {
        "multiply_adds_per_s": round(tokens * WIDTH * WIDTH / seconds(lambda: a @ b)),
        "bytes_per_s": round(2 * large.nbytes / seconds(lambda: target.copy_(large))),
    }


def against_floor(rows: dict[str, dict[str, Any]], tokens: int = 2048) -> dict[str, Any]:
    """Each form's operations, the least time they take here, and what part of the time measured that is.

    Args:
        rows: of the blocks, as `speed.layer` gives them.
        tokens: which of the lengths.
    """
    speed = machine(tokens)
    found: dict[str, Any] = {"machine": speed, "tokens": tokens}
    for name, (settings, folded) in FORMS.items():
        counted = operations(settings, folded)
        heads = tokens * HEADS
        least = max(
            heads * sum(counted.values()) / speed["multiply_adds_per_s"],
            heads * least_bytes(settings, folded) / speed["bytes_per_s"],
        )
        found[name] = {
            "multiply_adds_per_token_and_head": counted,
            "bytes_per_token_and_head": least_bytes(settings, folded),
            "least_s": round(least, 5),
            "achieved": round(least / rows[name][str(tokens)]["forward_s"], 3),
        }
    return found
