"""What a row of the layer weighs its values with, in linear time: exact softmax nearby, a sum of r v^T further away.

Letters: B batch, H query heads, G key/value heads, N queries, M >= N keys, d head dim, s rank, w window, C chunk.
Rows come in chunks of C. A chunk meets its neighbours densely, in windows of L = C + 2 w keys (C + w, causal) that
overlap in memory and are not copied; what lies beyond is a sum of r v^T over whole chunks. All of it is ours; the far
field is the chunked form that linear attention has in the literature.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .primal_triton import fused, usable

BLOCK = 256  # rows of a sliding-window layer that meet their keys at once


def in_sight(offset: Tensor, causal: bool, horizon: int | None) -> Tensor:
    """Where a query may see a key by their places alone, bool of the shape of `offset` (query minus key position)."""
    sight = offset >= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    return sight if horizon is None else sight & (offset.abs() < horizon)


def by_offset(bias: Tensor, offset: Tensor) -> Tensor:
    """The bias (H, 2P - 1) of key minus query position -(P - 1)..P - 1, where `offset` is query minus key: (H, ...)."""
    return bias[:, (bias.shape[-1] // 2 - offset).clamp(0, bias.shape[-1] - 1)]


class Windows:
    """Where chunks of rows and the windows of their keys lie in memory.

    Heads stand one behind another, each with `spare` empty chunks at its end, so that the windows of all heads are one
    strided view: matrix products take it as it is.
    """

    def __init__(self, tokens: int, keys: int, chunk: int, window: int, causal: bool) -> None:
        self.keys, self.chunk = keys, min(chunk, tokens)
        self.chunks = -(-tokens // self.chunk)
        right = 0 if causal else window - 2 * window % -self.chunk  # so that windows end where chunks do
        self.left, self.width = window, self.chunk + window + right
        self.missing = window - (keys - tokens)  # places before the first key
        spare = -(-(window + right) // self.chunk)
        alone = self.chunks == 1
        self.rows = 1 if alone else self.chunks + spare
        self.step = self.width if alone else self.chunk
        self.length, self.tail = self.rows * self.step, 0 if alone else spare * self.chunk

    def of_rows(self, x: Tensor, groups: int) -> Tensor:
        """(B, H, N, c) by chunks: (B G rows, H / G, C, c)."""
        x = F.pad(x, (0, 0, 0, self.rows * self.chunk - x.shape[-2]))
        x = x.unflatten(-2, (self.rows, self.chunk)).unflatten(1, (groups, -1))
        return x.transpose(2, 3).flatten(0, 2) if x.shape[2] > 1 else x.reshape(-1, 1, self.chunk, x.shape[-1])

    def to_rows(self, x: Tensor, batch: int, tokens: int) -> Tensor:
        """The reverse of `of_rows`."""
        x = x.view(batch, -1, self.rows, *x.shape[1:]).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[..., :tokens, :]

    def of_keys(self, x: Tensor) -> Tensor:
        """(B, G, M, c) with zeros around every head: (B G length + tail, c)."""
        batch, groups, keys, width = x.shape
        flat = x.new_zeros(batch * groups * self.length + self.tail, width)
        heads = flat[: batch * groups * self.length].view(batch, groups, self.length, width)
        heads[:, :, self.missing : self.missing + keys] = x
        return flat

    def windows(self, flat: Tensor) -> Tensor:
        """What `of_keys` made, by windows: (B G rows, c, L), a view."""
        found: Tensor = Unfold.apply(flat, self.width, self.step)
        return found

    def blocks(self, flat: Tensor) -> Tensor:
        """What `of_keys` made, by chunks: (B G rows, C, c), a view; a window begins with its row's block."""
        return flat[: len(flat) - self.tail].view(-1, self.chunk, flat.shape[-1])

    def seen(self, valid: Tensor) -> Tensor:
        """(B, M) bool by windows: (B, rows, L); False outside the sequence."""
        behind = self.length + self.tail - self.missing - valid.shape[-1]
        return F.pad(valid, (self.missing, behind)).unfold(-1, self.width, self.step)

    def edges(self) -> list[slice]:
        """Rows of windows that reach beyond the sequence."""
        inside = -(-self.missing // self.step)  # the first one that begins with or after the first key
        beyond = max(inside, (self.missing + self.keys - self.width) // self.step + 1)
        return [rows for rows in (slice(0, inside), slice(beyond, self.rows)) if rows.start < rows.stop]

    def offset(self, device: torch.device) -> Tensor:
        """Query minus key position in a window, (C, L)."""
        return torch.arange(self.chunk, device=device)[:, None] + self.left - torch.arange(self.width, device=device)


class Unfold(torch.autograd.Function):
    """`flat.unfold(0, width, step)`, (rows, c, width), with a backward pass that adds whole blocks of `step`."""

    @staticmethod
    def forward(flat: Tensor, width: int, step: int) -> Tensor:
        """See the class; flat (length, c)."""
        return flat.unfold(0, width, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        """Keep the sizes."""
        ctx.length, ctx.step = len(inputs[0]), inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Of (rows, c, width): every place of `flat` is in as many windows as steps fit into the width."""
        pieces = grad.mT.split(ctx.step, 1)
        blocks = grad.new_zeros(len(grad) + len(pieces) - 1, ctx.step, grad.shape[1])
        for first, piece in enumerate(pieces):
            blocks[first : first + len(grad), : piece.shape[1]] += piece
        flat = blocks.flatten(0, 1)
        return F.pad(flat, (0, 0, 0, ctx.length - len(flat))), None, None


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    r: Tensor,
    log_sum: Tensor | None,
    window: int,
    chunk: int,
    causal: bool = False,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact softmax weights for |i - j| < w and the kernel e_i . r_j elsewhere, times v; and the sum of the weights.

    All terms are positive for non-negative factors, so nothing cancels, and where chunks begin changes nothing but
    rounding. Both results of a row are divided by the same number, of the size of its largest weight; where there is a
    band they mean something as a ratio alone. On NVIDIA GPUs with Triton fused kernels do it (`primal_triton`).

    Args:
        q: (B, H, N, d), scaled.
        k: (B, G, M, d); the last N keys are those of the queries, the others come before; zero where not `seen`.
        v: (B, G, M, d), likewise.
        e: (B, H, N, s).
        r: (B, H, M, s), zero where not `seen`.
        log_sum: (B, H, N, 1), the logarithm of what e is divided by; not used where w is 0.
        window: w.
        chunk: C.
        causal: a query sees no later key.
        seen: (B, M) bool, which keys are tokens; None is all.
        bias: (H, 2P - 1), P >= M, added to q . k by key position minus query position, from -(P - 1) to P - 1.
        past: (B, H, s, d + 1), the sum of r [v, 1]^T over keys further back than those given; None is none.

    Returns:
        (B, H, N, d) and (B, H, N, 1), in the dtype of q; in float32 from the kernels.
    """
    if log_sum is not None and usable(q, v, e, window, bias):
        return fused(q, k, v, e, r, log_sum, window, causal, seen, bias, past)
    known = torch.ones(1, k.shape[-2], dtype=torch.bool, device=q.device) if seen is None else seen
    (batch, groups), (tokens, dim) = v.shape[:2], (q.shape[-2], v.shape[-1])
    layout = Windows(tokens, k.shape[-2], chunk, window, causal)
    offset = layout.offset(q.device)
    outside = offset >= window if causal else offset.abs() >= window
    r = r.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # (B, G, M, H / G s)
    r, v = layout.of_keys(r), layout.of_keys(v)
    e = layout.of_rows(e, groups)
    r_near, v_near = layout.windows(r).unflatten(1, (-1, e.shape[-1])), layout.windows(v).mT
    if window:
        assert log_sum is not None
        rows, log_sum = layout.of_rows(q, groups), layout.of_rows(log_sum, groups)
        allowed = torch.zeros_like(offset, dtype=q.dtype)
        allowed.masked_fill_(~in_sight(offset, causal, window), float("-inf"))
        allowed = allowed.repeat(rows.shape[1], 1)
        exact = torch.baddbmm(allowed, rows.flatten(1, 2), layout.windows(layout.of_keys(k)))
        by_head = exact.view(batch, groups, layout.rows, rows.shape[1], layout.chunk, layout.width)
        if bias is not None:
            by_head += by_offset(bias, offset).unflatten(0, (groups, 1, -1))
        for edge in layout.edges() if seen is None else [slice(None)]:
            unseen = ~layout.seen(known)[:, None, edge, None, None]
            by_head[:, :, edge].masked_fill_(unseen, float("-inf"))
        exact = by_head.flatten(0, 2)
        exact.diagonal(dim1=-2, dim2=-1).copy_(log_sum.squeeze(-1))  # of the key w before a row, outside its band
        weights = exact.softmax(-1)
        e = e * weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        weights = torch.lerp(weights, e @ r_near, outside.to(q.dtype))
    else:
        weights = (e @ r_near).mul_(outside)
    mass = weights.sum(-1, keepdim=True)
    weights = weights.flatten(1, 2)
    if layout.chunks > 1 or past is not None:
        far = far_sums(layout, r, v, batch * groups, causal, past).unflatten(1, (-1, e.shape[-1]))
        total = (e @ far[..., :-1]).flatten(1, 2).baddbmm_(weights, v_near)
        mass = mass + e @ far[..., -1:]
    else:
        total = weights @ v_near
    total = total.view(*mass.shape[:-1], dim)
    return layout.to_rows(total, batch, tokens), layout.to_rows(mass, batch, tokens)


def far_sums(layout: Windows, r: Tensor, v: Tensor, heads: int, causal: bool, past: Tensor | None) -> Tensor:
    """The sum of r [v, 1]^T beyond the window of every chunk, (heads rows, H / G s, d + 1)."""
    if layout.chunks > 1:
        r, v = layout.blocks(r), layout.blocks(v)
        sums = torch.cat((r.mT @ v, r.sum(1).unsqueeze(-1)), -1).unflatten(0, (heads, -1))
        far = F.pad(sums.cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0))
        if not causal:
            ahead = layout.width // layout.chunk
            after = sums[:, ahead:].flip(1).cumsum(1).flip(1)
            far = far + F.pad(after, (0, 0, 0, 0, 0, ahead))
    else:
        far = r.new_zeros(())
    if past is not None:
        far = far + past.unflatten(1, (-1, r.shape[-1] // past.shape[-2])).flatten(2, 3).flatten(0, 1)[:, None]
    return far.flatten(0, 1)


def sliding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    r: Tensor,
    log_sum: Tensor | None,
    window: int,
    horizon: int,
    causal: bool = False,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `banded` for a sliding-window layer: a query sees keys at a distance below `horizon`, all met densely."""
    assert log_sum is not None  # sliding-window layers have landmark features
    groups, tokens = v.shape[1], q.shape[-2]
    q, e, log_sum = (x.unflatten(1, (groups, -1)) for x in (q, e, log_sum))
    r, k, v = r.unflatten(1, (groups, -1)), k.unsqueeze(2), v.unsqueeze(2)
    before = k.shape[-2] - tokens
    parts = []
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        first = max(begin + before - horizon + 1, 0)
        last = end + before if causal else min(end + before + horizon - 1, k.shape[-2])
        rows, keys = (..., slice(begin, end), slice(None)), (..., slice(first, last), slice(None))
        offset = torch.arange(begin, end, device=q.device)[:, None] + before
        offset = offset - torch.arange(first, last, device=q.device)
        allowed = in_sight(offset, causal, horizon)
        if seen is not None:
            allowed = allowed & seen[:, None, None, None, first:last]
        exact = q[rows] @ k[keys].mT
        exact = exact.masked_fill(~(allowed & (offset.abs() < window)), float("-inf"))
        largest = torch.maximum(exact.detach().amax(-1, keepdim=True), log_sum[rows].detach())
        far = (e[rows] * (log_sum[rows] - largest).exp()) @ r[keys].mT
        weights = (exact - largest).exp() + far.masked_fill(~(allowed & (offset.abs() >= window)), 0.0)
        parts.append((weights @ v[keys], weights.sum(-1, keepdim=True)))
    total, mass = (torch.cat(part, -2).flatten(1, 2) for part in zip(*parts, strict=True))
    return total, mass
