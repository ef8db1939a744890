"""Primal-Attention as one layer: scores from the asymmetric kernel SVD, read out in linear time.

Letters: B batch, H heads, N tokens, d head dim, p feature dim, s rank, w window, C chunk.
Time O(N (p s + s d + w d)) and memory O(N (p + w)) per head: no N x N matrix exists at any point.
The work is done in float32 or better, whatever the model's dtype.

Source: Primal-Attention, arXiv:2305.19798 (equations 6 to 10). The landmark features, the read-out
`values` with its exact band, and the handling of padding are ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPONENT_LIMIT = 30.0  # landmark key features stay below exp(30), far inside float32


@dataclass(frozen=True)
class PrimalSettings:
    """What a Primal-Attention layer is made of; `None` means "the value that fits the rest".

    Args:
        rank: s, directions kept per head, >= 1; at most the feature dim for `fixed` weights.
        features: p, landmarks per head, >= 1 (None: 32). Only for the landmark map; the cosine map has p = d.
        window: half-width w in tokens of the exact softmax band, >= 0; 0 is no band (None: 16 where the
            read-out allows a band, else 0).
        feature_map: "landmark" (ours) or "cosine" (the paper's x / ||x||).
        weights: "fixed" (We, Wr in R^{p x s}) or "sampled" (the paper's data-dependent W_{e|X} = F^T We).
        readout: "values" (ours: the rank-s kernel weighs the values) or "scores" (the paper's W_o [e; r] + b).
        nonnegative: keep We, Wr >= 0, so that every kernel entry is positive (None: True for landmark).
        rank_multi: `sampled` weights use min(rank * rank_multi, N) evenly spaced rows, >= 1.
        shared_out_map: one W_o for all heads, as in the official code, instead of one per head.
        ksvd_weight: eta, the weight of the KSVD loss while training, >= 0; 0 switches it off.

    Raises:
        ValueError: a value outside the above, or a combination that has no meaning.
    """

    rank: int = 16
    features: int | None = None
    window: int | None = None
    feature_map: str = "landmark"
    weights: str = "fixed"
    readout: str = "values"
    nonnegative: bool | None = None
    rank_multi: int = 10
    shared_out_map: bool = False
    ksvd_weight: float = 0.1

    def __post_init__(self) -> None:
        """Check, and fill in what was left open."""
        landmark = self.feature_map == "landmark"
        banded = self.readout == "values" and landmark and self.nonnegative is not False
        self._check_choices(landmark, banded)
        fitting = {"nonnegative": landmark, "features": 32 if landmark else None, "window": 16 if banded else 0}
        for name, value in fitting.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, least in (("rank", 1), ("features", 1), ("window", 0), ("rank_multi", 1), ("ksvd_weight", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.features is not None and self.rank > self.features:
            raise ValueError(f"rank must be 1..{self.features} (features), got {self.rank}")

    def _check_choices(self, landmark: bool, banded: bool) -> None:
        """Refuse words that are not known and choices that do not go together."""
        allowed = {
            "feature_map": ("landmark", "cosine"),
            "weights": ("fixed", "sampled"),
            "readout": ("values", "scores"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be {' or '.join(values)}, got {getattr(self, name)!r}")
        if not landmark and self.features is not None:
            raise ValueError("features is for feature_map landmark (cosine has as many as the head has dimensions)")
        if self.weights == "sampled" and landmark:
            raise ValueError("weights sampled needs feature_map cosine")
        if self.nonnegative and not landmark:
            raise ValueError("nonnegative needs feature_map landmark (cosine features change sign)")
        if self.shared_out_map and self.readout != "scores":
            raise ValueError("shared_out_map needs readout scores")
        if self.window and not banded:
            raise ValueError(f"window {self.window} needs readout values and non-negative factors; use window 0")

    @classmethod
    def paper(cls, **changes: object) -> "PrimalSettings":
        """The paper's encoder mechanism: cosine features, sampled weights, scores read-out (rank 20 of its grid)."""
        own = {"rank": 20, "feature_map": "cosine", "weights": "sampled", "readout": "scores"}
        return cls(**{**own, **changes})  # type: ignore[arg-type]


class PrimalAttention(nn.Module):
    """One layer's Primal-Attention, in the place of softmax attention between q, k, v and the output projection.

    Args:
        heads: H, query heads.
        head_dim: d.
        settings: what to build.

    Raises:
        ValueError: a rank above the head dim for the cosine map with fixed weights.
    """

    shift: Tensor
    coupling: Tensor

    def __init__(self, heads: int, head_dim: int, settings: PrimalSettings) -> None:
        super().__init__()
        self.settings = settings
        self.chunk_size = 32  # the fastest on CPUs; changes nothing but speed and rounding
        self.regularised = settings.ksvd_weight > 0  # whether training forwards work out J
        self.last: Tensor | None = None  # J of the latest training forward
        rank, dim = settings.rank, settings.features or head_dim
        if settings.weights == "fixed" and rank > dim:
            raise ValueError(f"rank must be 1..{dim} (head dim), got {rank}")
        rows = rank * settings.rank_multi if settings.weights == "sampled" else dim
        self.We = nn.Parameter(torch.empty(heads, rows, rank))
        self.Wr = nn.Parameter(torch.empty(heads, rows, rank))
        self.Lambda = nn.Parameter(torch.empty(heads, rank))
        groups = 1 if settings.shared_out_map else heads
        self.out_map = nn.Parameter(torch.empty(groups, 2 * rank, head_dim))
        self.out_bias = nn.Parameter(torch.empty(groups, 1, head_dim))
        if settings.feature_map == "landmark":
            self.key_landmarks = nn.Parameter(torch.empty(heads, dim, head_dim))
            self.query_landmarks = nn.Parameter(torch.empty(heads, dim, head_dim))
            self.register_buffer("shift", torch.empty(heads, 1, dim))
        if settings.readout == "values":
            self.value_map = nn.Parameter(torch.empty(heads, head_dim, head_dim))
        if settings.weights == "fixed":
            self.register_buffer("coupling", torch.empty(heads, dim, dim))

    def initial_values(self) -> dict[str, Tensor]:
        """Values for training from scratch: orthonormal We and Wr, Lambda ~ U(0, 1) (the paper), identity read-out."""
        values = {}
        for name, tensor in self.state_dict().items():
            shape = tensor.shape
            if name in ("We", "Wr"):
                square = torch.randn(shape[0], max(shape[1:]), max(shape[1:]))
                fresh = torch.linalg.qr(square)[0][:, : shape[1], : shape[2]]
            elif name == "Lambda":
                fresh = torch.rand(shape)
            elif name in ("value_map", "coupling"):
                fresh = torch.eye(shape[-1]).expand(shape)
            elif name in ("shift", "out_bias"):
                fresh = torch.zeros(shape)
            else:
                fresh = torch.randn(shape) * shape[-2] ** -0.5
            values[name] = fresh.to(tensor.dtype)
        return values

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, scaling: float | None = None
    ) -> Tensor:
        """Attend.

        Args:
            query: (B, H, N, d), as the attention module hands it over (after RoPE and norms).
            key: (B, H, N, d).
            value: (B, H, N, d).
            valid: (B, N) bool, True for tokens and False for padding; None when there is no padding.
            scaling: factor of q . k, d ** -0.5 when None.

        Returns:
            (B, N, H, d) in the query's dtype; zero at padding. While training, `last` holds the KSVD
            objective J, a float32 scalar.
        """
        with torch.autocast(query.device.type, enabled=False):
            context, scores = self.context_and_scores(query, key, value, valid, scaling)
            output = self.readable(scores) @ self.out_map.to(scores.dtype) + self.out_bias.to(scores.dtype)
            if context is not None:
                output = output + context @ self.value_map.to(scores.dtype)
            if valid is not None:
                output = output.masked_fill(~valid[:, None, :, None], 0.0)
            if self.training and self.regularised:
                self.last = self.objective(scores, valid)
            return output.transpose(1, 2).to(query.dtype)

    def context_and_scores(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, scaling: float | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """C (B, H, N, d), None for the scores read-out, and the scores [e; r] (B, H, N, 2s).

        Both in float32 or better. Arguments as for `forward`. Source: equation 6; c is ours (design, section 2).
        """
        precise = torch.promote_types(query.dtype, torch.float32)
        q, k, v = query.to(precise), key.to(precise), value.to(precise)
        if valid is not None:
            hidden = ~valid[:, None, :, None]
            q, k, v = (x.masked_fill(hidden, 0.0) for x in (q, k, v))
        q = q * (scaling if scaling is not None else q.shape[-1] ** -0.5)
        psi_q, psi_k, log_sum = self.feature_maps(q, k)
        We, Wr = self.projections(v, valid)
        e, r = psi_q @ We, psi_k @ Wr
        if valid is not None:
            e, r = e.masked_fill(hidden, 0.0), r.masked_fill(hidden, 0.0)
        scores = torch.cat((e, r), -1)
        if self.settings.readout == "scores":
            return None, scores
        if not self.settings.nonnegative:
            tokens = v.shape[-2] if valid is None else valid.sum(-1).clamp(min=1)[:, None, None, None]
            return e @ (r.mT @ v) / tokens, scores
        v = F.pad(v, (0, 1), value=1.0)  # the last column sums the kernel
        if self.settings.window:
            assert log_sum is not None
            total = self.banded(q, k, v, e, r, log_sum, valid)
        else:
            total = e @ (r.mT @ v)
        return total[..., :-1] / total[..., -1:].clamp(min=torch.finfo(precise).tiny), scores

    def readable(self, scores: Tensor) -> Tensor:
        """The scores as W_o meets them: e and r each of length 1 for landmark features, which are heavy-tailed."""
        if self.settings.feature_map == "cosine":
            return scores
        return F.normalize(scores.unflatten(-1, (2, -1)), dim=-1).flatten(-2)

    def feature_maps(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """psi_q and psi_k, (B, H, N, p), of scaled queries and keys, and the landmark log-sum (B, H, N, 1)."""
        if self.settings.feature_map == "cosine":
            return F.normalize(q, dim=-1), F.normalize(k, dim=-1), None
        logits = q @ self.key_landmarks.to(q.dtype).mT
        log_sum = logits.logsumexp(-1, keepdim=True)
        exponent = k @ self.query_landmarks.to(q.dtype).mT - self.shift.to(q.dtype)
        return (logits - log_sum).exp(), exponent.clamp(max=EXPONENT_LIMIT).exp(), log_sum

    def projections(self, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """We and Wr as the features meet them: (H, p, s) fixed, (B, H, d, s) sampled (equation 5, f(X) = values)."""
        We, Wr = self.We.to(v.dtype), self.Wr.to(v.dtype)
        if self.settings.nonnegative:
            return We.abs(), Wr.abs()  # the absolute value keeps them so under any optimiser
        if self.settings.weights == "fixed":
            return We, Wr
        index, used = sample_positions(v.shape[-2], We.shape[1], valid, v.device)
        rows = v.gather(2, index[:, None, :, None].expand(*v.shape[:2], -1, v.shape[-1]))
        rows = (rows * used[:, None, :, None]).mT
        return rows @ We, rows @ Wr

    def banded(
        self, q: Tensor, k: Tensor, v: Tensor, e: Tensor, r: Tensor, log_sum: Tensor, valid: Tensor | None
    ) -> Tensor:
        """Exact softmax weights for |i - j| < w, the kernel e_i . r_j elsewhere, times v: (B, H, N, d + 1).

        Rows come in chunks of C. A chunk meets its C + 2 w neighbours densely; what lies further left or right
        is a sum of r v^T over whole chunks. All terms are positive, so nothing cancels, and where the chunks
        begin changes nothing but rounding. Each row is scaled by exp(-max(0, its band maximum)).
        """
        tokens, window = q.shape[-2], self.settings.window or 0
        size = min(self.chunk_size, tokens)
        tail = -tokens % size
        width = size + 2 * window

        def chunks(x: Tensor, left: int = 0) -> Tensor:
            """(..., N, a) moved right by `left`, in chunks (..., N / C, C, a)."""
            return F.pad(x, (0, 0, left, tail - left)).unflatten(-2, (-1, size))

        def neighbours(x: Tensor) -> Tensor:
            """(..., N, a) as each chunk's surroundings (..., N / C, a, C + 2 w)."""
            return F.pad(x, (0, 0, window, window + tail)).unfold(-2, width, size)

        distance = torch.arange(size, device=q.device)[:, None] + window - torch.arange(width, device=q.device)
        band = distance.abs() < window
        real = torch.ones(1, tokens, dtype=torch.bool, device=q.device) if valid is None else valid
        seen = F.pad(real, (window, window + tail)).unfold(-1, width, size)[:, None, :, None]
        exact = chunks(q) @ neighbours(k) - chunks(log_sum)
        exact = exact.masked_fill(~(band & seen), float("-inf"))
        row_max = exact.detach().amax(-1, keepdim=True).clamp(min=0.0)
        scale = (-row_max).exp()
        low_rank = (chunks(e) @ neighbours(r)) * scale
        kernel = torch.where(band, (exact - row_max).exp(), low_rank)
        total = kernel @ neighbours(v).mT
        if tokens > max(size, window):
            before = (chunks(r, window).mT @ chunks(v, window)).cumsum(-3)
            after = (chunks(r, -window).mT @ chunks(v, -window)).flip(-3).cumsum(-3).flip(-3)
            far = F.pad(before[..., :-1, :, :], (0, 0, 0, 0, 1, 0)) + F.pad(after[..., 1:, :, :], (0, 0, 0, 0, 0, 1))
            total = total + (chunks(e) @ far) * scale
        return total.flatten(-3, -2)[..., :tokens, :]

    def objective(self, scores: Tensor, valid: Tensor | None = None) -> Tensor:
        """J = 1/2 mean ||Lambda e||^2 + 1/2 mean ||Lambda r||^2 - mean_heads Tr(We^T coupling Wr), a scalar.

        Args:
            scores: [e; r], (B, H, N, 2s), zero at padding.
            valid: (B, N) bool or None; the means run over valid tokens only.

        Source: equation 10, with the official code's conventions (Lambda enters squared, token means); the
        coupling of the two feature spaces is ours, the identity for the paper's forms.
        """
        tokens = scores.shape[0] * scores.shape[2] if valid is None else valid.sum().clamp(min=1)
        squares = scores.square().sum((0, 2)) / tokens  # (H, 2s)
        energy = 0.5 * (squares.unflatten(-1, (2, -1)).sum(-2) * self.Lambda.to(scores.dtype).square()).sum(-1)
        return (energy - self.traces(scores.dtype).sum(-1)).mean()

    def traces(self, dtype: torch.dtype) -> Tensor:
        """The diagonal of We^T coupling Wr, (H, s); coupling is the identity for sampled weights."""
        We, Wr = self.We.to(dtype), self.Wr.to(dtype)
        if self.settings.nonnegative:
            We, Wr = We.abs(), Wr.abs()
        if self.settings.weights == "fixed":
            Wr = self.coupling.to(dtype) @ Wr
        return (We * Wr).sum(-2)


def sample_positions(tokens: int, slots: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """N = min(slots, N) evenly spaced valid tokens of each sequence (section 4.2 of the paper).

    Args:
        tokens: padded length.
        slots: rows of We.
        valid: (B, tokens) bool or None.
        device: where to build them.

    Returns:
        Token index of each slot, (B or 1, slots) int64, and whether the slot is used, (B or 1, slots) bool: a
        sequence with fewer valid tokens than slots fills evenly spaced slots and leaves the others empty.
    """
    slot = torch.arange(slots, device=device)
    if valid is None:
        valid = torch.ones(1, tokens, dtype=torch.bool, device=device)
    count = valid.sum(-1, keepdim=True)
    order = (~valid).to(torch.int8).argsort(dim=-1, stable=True)  # valid tokens first, in order
    last, last_slot = (count - 1).clamp(min=0), max(slots - 1, 1)
    nth = (2 * slot * last + last_slot) // (2 * last_slot)  # rounded slot * last / last_slot, in integers
    back = (2 * nth * last_slot + last) // (2 * last.clamp(min=1))
    used = ((count >= slots) | (back == slot)) & (count > 0)
    return order.gather(-1, nth), used


def visible(mask: Tensor) -> Tensor:
    """Where a mask lets a query see a key, bool of the mask's shape: bool masks keep True, float ones are additive."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def key_padding(mask: Tensor | None, tokens: int) -> Tensor | None:
    """(B, N) bool, True for tokens, from whatever mask an attention module hands over; None when nothing is hidden.

    A token is padding when no query may see it, which is right for full, causal and sliding masks alike.
    """
    if mask is None:
        return None
    keep = visible(mask)
    if keep.ndim == 4:
        keep = keep.any(1).any(-2)
    return keep[:, -tokens:]


def primal_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function of a replaced layer, in the form that Transformers calls.

    Args:
        module: the attention module; its child `primal` does the work.
        query: (B, H, N, d).
        key: (B, G, N, d), repeated here to H heads.
        value: (B, G, N, d).
        attention_mask: as the model builds it for sdpa or eager attention.
        scaling: factor of q . k.
        **kwargs: what other attention functions use (dropout and the like).

    Returns:
        The output, (B, N, H, d), and None: there is no attention matrix.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    primal: Any = module.primal  # a PrimalAttention, or what wraps it
    return primal(query, key, value, key_padding(attention_mask, key.shape[-2]), scaling), None
