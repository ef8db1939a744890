"""Primal-Attention as one layer: scores from the asymmetric kernel SVD, read out in linear time.

Letters: B batch, H query heads, G key/value heads, N tokens, d head dim, p feature dim, s rank, w window, C chunk.
Time O(N (p s + s d + w d)) and memory O(N (p + w)) per head: no N x N matrix exists at any point.
The work is done in float32 or better, whatever the model's dtype.

Source: Primal-Attention, arXiv:2305.19798 (equations 6 to 10). The landmark features, the read-out
`values` with its exact band, its causal form, and the handling of padding are ours.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .primal_band import banded, sliding
from .primal_settings import PrimalSettings

PART = 16384  # rows of all heads that a CPU works on at once
EXPONENT_LIMIT = 30.0  # landmark key features stay below exp(30), far inside float32


class PrimalAttention(nn.Module):
    """One layer's Primal-Attention, in the place of softmax attention between q, k, v and the output projection.

    Args:
        heads: H, query heads.
        head_dim: d.
        settings: what to build.
        folded: which of "query", "key" and "value" come with the layer's own maps applied already: the landmarks'
            logits in the place of q and k, v W_v in the place of v. See `primal_fold`.

    Raises:
        ValueError: a rank above the head dim for the cosine map with fixed weights.
    """

    shift: Tensor
    coupling: Tensor

    def __init__(self, heads: int, head_dim: int, settings: PrimalSettings, folded: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.settings, self.folded = settings, folded
        self.chunk_size = 32  # the fastest on CPUs; changes nothing but speed and rounding
        self.regularised = settings.ksvd_weight > 0  # whether training forwards work out J
        self.alone = True  # not part of a model
        self.last: Tensor | None = None  # J of the latest training forward of a layer on its own
        self.squares: list[Tensor] | None = None  # of J, one a call, while the forward of a model gathers them
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
        if settings.feature_map == "landmark" and "query" not in folded:
            self.key_landmarks = nn.Parameter(torch.empty(heads, dim, head_dim))
            self.query_landmarks = nn.Parameter(torch.empty(heads, dim, head_dim))
            self.register_buffer("shift", torch.empty(heads, 1, dim))
        if settings.readout == "values" and "value" not in folded:
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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None = None,
        scaling: float | None = None,
        causal: bool = False,
        horizon: int | None = None,
        bias: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: (B, H, N, d), as the attention module hands it over (after RoPE and norms).
            key: (B, G, N, d); G divides H.
            value: (B, G, N, d).
            valid: (B, N) bool, True for tokens and False for padding; None when there is no padding.
            scaling: factor of q . k, d ** -0.5 when None.
            causal: a query sees no later key.
            horizon: a query sees keys at a distance below this; None is no limit.
            bias: (H, 2M - 1), M >= N, what is added to q . k in the band by key position minus query position,
                from -(M - 1) to M - 1.
            state: what is kept of the tokens before these, for causal layers; brought up to date in place. An empty
                dict is the start of a sequence.

        Returns:
            (B, N, H, d) in the query's dtype; zero at padding. While training, the KSVD objective goes where
            `keep` says.

        Raises:
            ValueError: sampled weights in a causal layer; a horizon without non-negative factors.
        """
        with torch.autocast(query.device.type, enabled=False):
            if "query" in self.folded:  # a module views them as heads of d
                query, key = (x.transpose(1, 2).flatten(2).unflatten(-1, (len(self.We), -1)) for x in (query, key))
                query, key = query.transpose(1, 2), key.transpose(1, 2)
            options = {"scaling": scaling, "causal": causal, "horizon": horizon}
            output, scores = self.attend(query, key, value, valid, bias, state, **options)
            if self.training and self.regularised:
                assert scores is not None
                self.keep(*self.objectives(scores, valid))
            return output

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        state: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` gives, (B, N, H, d), and the scores while training, (B, H, N, 2s).

        On a CPU in parts, so that what is between two steps stays in the processor's cache; in training each part is
        worked out again in the backward pass, and nothing of it is kept.
        """
        recorded = torch.is_grad_enabled()
        sizes = self.part_sizes(query, value, state, recorded)
        if sizes is None:
            return self.attend_at_once(query, key, value, valid, bias, state, **options)
        calls = self.parts(query, key, value, valid, bias, state, *sizes)
        attend, across = functools.partial(self.attend_heads, **options), -(-value.shape[1] // sizes[1])
        if recorded:
            found = [checkpoint(attend, *call, use_reentrant=False, preserve_rng_state=False) for call in calls]
            outputs, scores = zip(*found, strict=True)
            return tiled(outputs, across, 2), None if scores[0] is None else tiled(scores, across, 1)
        output = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[-1])
        each = sizes[1] * query.shape[1] // value.shape[1]
        for target, call in zip(tiles(output, sizes[0], each, 2), calls, strict=True):
            target.copy_(attend(*call)[0])
        if state is not None:
            after = [call[-1] for call in calls]
            for name, first in after[0].items():
                state[name] = first if first.ndim < 3 else torch.cat([part[name] for part in after], 1)
        return output, None

    def part_sizes(
        self, query: Tensor, value: Tensor, state: dict[str, Tensor] | None, recorded: bool
    ) -> tuple[int, int] | None:
        """Sequences and key heads of each part that is worked on at once; None where all are."""
        (batch, groups), heads = value.shape[:2], len(self.We)
        of_one = query[0, 0, :, 0].numel() * (heads // groups)  # rows of one key head of one sequence
        at_once = PART // max(of_one, 1)
        whole = query.device.type != "cpu" or torch.compiler.is_compiling() or (recorded and state is not None)
        whole = whole or self.settings.readout == "scores"  # there is little between two steps
        if whole or batch * groups <= max(at_once, 1):
            return None
        if state is not None:
            return batch, max(at_once // batch, 1)
        return (at_once // groups, groups) if at_once >= groups else (1, max(at_once, 1))

    def parts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        state: dict[str, Tensor] | None,
        rows: int,
        groups: int,
    ) -> list[tuple[Any, ...]]:
        """Arguments of `attend_heads` for every part of so many sequences and key heads.

        Tensors are split and not sliced: the gradient of a slice is a tensor of zeros as large as the whole.
        """
        heads = len(self.We)
        each = groups * heads // value.shape[1]
        mine = [slice(first, first + each) for first in range(0, heads, each)]
        inputs = zip(tiles(query, rows, each, 1), *(tiles(x, rows, groups, 1) for x in (key, value)), strict=True)
        masks: Any = None if valid is None else valid.split(rows)
        biases: Any = None if bias is None else bias.split(each)
        states: list[Any] = [None if state is None else {} for _ in mine]
        for name, x in (state or {}).items():
            pieces = [x] * len(mine) if x.ndim < 3 else x.split(each if x.shape[1] == heads else groups, 1)
            for part, piece in zip(states, pieces, strict=True):
                part[name] = piece
        found = []
        for place, tensors in enumerate(inputs):
            strip, i = divmod(place, len(mine))
            extra = (None if valid is None else masks[strip], None if bias is None else biases[i], states[i])
            found.append((mine[i], *tensors, *extra))
        return found

    def attend_heads(self, heads: slice, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """`attend_at_once` of some heads, whose inputs these are; the parameters are cut when it is called."""
        layer = copy.copy(self)
        for own in ("_parameters", "_buffers"):
            vars(layer)[own] = {name: x if len(x) == 1 else x[heads] for name, x in vars(self)[own].items()}
        return layer.attend_at_once(*inputs, **options)

    def attend_at_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        state: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend` without parts."""
        query, key, value = (x.contiguous() for x in (query, key, value))  # heads of a projection lie far apart
        context, scores = self.context_and_scores(query, key, value, valid, bias=bias, state=state, **options)
        output = self.read(context, scores)
        if valid is not None:
            output = output.masked_fill(~valid[:, None, :, None], 0.0)
        return output.transpose(1, 2).to(query.dtype), scores if self.training and self.regularised else None

    def context_and_scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None = None,
        scaling: float | None = None,
        causal: bool = False,
        horizon: int | None = None,
        bias: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """C (B, H, N, d), None for the scores read-out, and the scores [e; r] (B, H, N, 2s).

        Both in float32 or better. Arguments as for `forward`. Source: equation 6; c is ours (design, section 2).
        """
        self.check_sight(causal, horizon)
        precise = torch.promote_types(query.dtype, torch.float32)
        tokens, seen = query.shape[-2], valid
        if state is not None:
            key, value, seen = self.recall(state, query, key, value, valid, horizon)
        q, k, v = self.prepared(query, key, value, valid, seen, scaling)
        new_q, new_k = self.averaged(q, k[..., -tokens:, :], valid, causal, state)
        e, r, log_sum = self.scores(new_q, new_k, *self.projections(v, valid))
        if valid is not None:
            e, r = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (e, r))
        scores = torch.cat((e, r), -1)
        if self.settings.readout == "scores":
            return None, scores
        if state is not None:
            r = torch.cat((state["r"], r), -2)
            state["r"] = r[..., tokens:, :].clone()
        if horizon is not None:
            total, mass = sliding(q, k, v, e, r, log_sum, self.settings.window or 0, horizon, causal, seen)
        elif causal or self.settings.window:
            past = None if state is None else state["far"]
            total, mass = banded(
                q, k, v, e, r, log_sum, self.settings.window or 0, self.chunk_size, causal, seen, bias, past
            )
            if state is not None:
                state["far"] = state["far"] + self.sums(r[..., :tokens, :], v[..., :tokens, :])
        else:
            sums = self.sums(r, v)
            total, mass = e @ sums[..., :-1], e @ sums[..., -1:]
        if self.settings.nonnegative:
            return total / mass.clamp(min=torch.finfo(precise).tiny), scores
        return total / self.counted(q, valid, causal, state), scores

    def sums(self, r: Tensor, v: Tensor) -> Tensor:
        """The sum of r [v, 1]^T over keys, (B, H, s, d + 1); r (B, H, N, s), v (B, G, N, d)."""
        rv = (r.unflatten(1, (v.shape[1], -1)).mT @ v.unsqueeze(2)).flatten(1, 2)
        return torch.cat((rv, r.sum(-2).unsqueeze(-1)), -1)

    def prepared(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        seen: Tensor | None,
        scaling: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k, v in float32 or better, zero at padding; q is scaled where its length matters."""
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        if valid is not None:
            q = q.masked_fill(~valid[:, None, :, None], 0.0)
        if seen is not None:
            k, v = (x.masked_fill(~seen[:, None, :, None], 0.0) for x in (k, v))
        if self.settings.feature_map == "landmark" and "query" not in self.folded:
            q = q * (scaling if scaling is not None else q.shape[-1] ** -0.5)
        return q, k, v

    def check_sight(self, causal: bool, horizon: int | None) -> None:
        """Refuse what a form of the layer has no meaning for; see `forward`."""
        if causal and self.settings.weights == "sampled":
            raise ValueError("weights sampled look at the whole sequence, which a causal layer must not; use fixed")
        if horizon is not None and not (self.settings.nonnegative and self.settings.readout == "values"):
            raise ValueError("a sliding-window layer needs readout values and feature_map landmark")

    def recall(
        self,
        state: dict[str, Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        horizon: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and validity of the tokens that the state still holds one by one, then of the new ones.

        The state is updated to hold the latest of them; an empty one is filled with zeros of its final shapes.
        """
        batch, heads, tokens, dim = query.shape
        if not state:
            precise = torch.promote_types(query.dtype, torch.float32)
            rank = self.settings.rank
            exact: dict[str, Any] = {"dtype": precise, "device": query.device}
            state["count"] = torch.zeros(batch, dtype=torch.int64, device=query.device)
            if self.settings.readout == "scores":
                state["q_sum"], state["k_sum"] = (torch.zeros(batch, x.shape[1], dim, **exact) for x in (query, key))
            else:
                kept = self.reach(horizon)
                state["keys"], state["values"] = (x.new_zeros(*x.shape[:2], kept, x.shape[3]) for x in (key, value))
                state["r"] = torch.zeros(batch, heads, kept, rank, **exact)
                state["valid"] = torch.zeros(batch, kept, dtype=torch.bool, device=query.device)
                if horizon is None:
                    state["far"] = torch.zeros(batch, heads, rank, value.shape[-1] + 1, **exact)
        if valid is None:
            valid = torch.ones(batch, tokens, dtype=torch.bool, device=query.device)
        if self.settings.readout == "scores":
            return key, value, valid
        known = {"keys": key, "values": value, "valid": valid}
        for name, new in known.items():
            axis = 1 if name == "valid" else 2
            known[name] = torch.cat((state[name], new), axis)
            state[name] = known[name].narrow(axis, tokens, state[name].shape[axis]).clone()  # not a view of all
        return known["keys"], known["values"], known["valid"]

    def averaged(
        self, q: Tensor, k: Tensor, valid: Tensor | None, causal: bool, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys as the feature maps meet them: running means for causal scores, else as they are.

        Source: the official code's causal form (q, k averaged over the tokens seen, before the map).
        """
        if self.settings.readout != "scores" or not causal:
            return q, k
        count = torch.ones_like(q[:, 0, :, 0]) if valid is None else valid.to(q.dtype)
        count, sums = count.cumsum(-1), [x.cumsum(-2) for x in (q, k)]
        if state is not None:
            sums = [x + state[name][:, :, None] for x, name in zip(sums, ("q_sum", "k_sum"), strict=True)]
            state["q_sum"], state["k_sum"] = (x[:, :, -1].clone() for x in sums)
            count = count + state["count"][:, None]
            state["count"] = count[:, -1].to(torch.int64)
        q, k = (x / count.clamp(min=1.0)[:, None, :, None] for x in sums)
        return q, k

    def counted(self, q: Tensor, valid: Tensor | None, causal: bool, state: dict[str, Tensor] | None) -> Tensor:
        """How many keys each query sees, (B, 1, N or 1, 1): what signed factors are divided by."""
        count = torch.ones_like(q[:, 0, :, 0], dtype=torch.int64) if valid is None else valid.to(torch.int64)
        count = count.cumsum(-1) if causal else count.sum(-1, keepdim=True)
        if state is not None:
            count = count + state["count"][:, None]
            state["count"] = count[:, -1].clone()
        return count.clamp(min=1)[:, None, :, None]

    def reach(self, horizon: int | None) -> int:
        """Tokens on either side of a chunk whose keys its rows meet one by one."""
        return (self.settings.window or 0) if horizon is None else horizon - 1

    def read(self, context: Tensor | None, scores: Tensor) -> Tensor:
        """The output (B, H, N, d) before padding is silenced: c W_v + W_o [e; r] + b."""
        shape = scores.shape[:2]
        bias, out_map = (x.to(scores.dtype).expand(*shape, -1, -1).flatten(0, 1) for x in (self.out_bias, self.out_map))
        output = torch.baddbmm(bias, self.readable(scores).flatten(0, 1), out_map)
        if context is not None and "value" in self.folded:
            output = output.add_(context.flatten(0, 1))
        elif context is not None:
            value_map = self.value_map.to(scores.dtype).expand(*shape, -1, -1).flatten(0, 1)
            output = output.baddbmm_(context.flatten(0, 1), value_map)
        return output.unflatten(0, shape)

    def readable(self, scores: Tensor) -> Tensor:
        """The scores as W_o meets them: e and r each of length 1 for landmark features, which are heavy-tailed."""
        if self.settings.feature_map == "cosine":
            return scores
        return F.normalize(scores.unflatten(-1, (2, -1)), dim=-1).flatten(-2)

    def scores(self, q: Tensor, k: Tensor, We: Tensor, Wr: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """E and r, (B, H, N, s), of scaled queries and keys, and the landmark log-sum (B, H, N, 1).

        We^T psi_q and Wr^T psi_k (equation 6); for the cosine map the s scores are divided, not the d features.
        """
        if self.settings.feature_map == "cosine":
            groups = k.shape[1]
            r = unit_scores(k.unsqueeze(2), Wr.unflatten(-3, (groups, -1))).flatten(1, 2)
            return unit_scores(q, We), r, None
        psi_q, psi_k, log_sum = self.feature_maps(q, k)
        return psi_q @ We, psi_k @ Wr, log_sum

    def feature_maps(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """psi_q and psi_k, (B, H, N, p), of scaled queries and keys, and the landmark log-sum (B, H, N, 1)."""
        if self.settings.feature_map == "cosine":
            return F.normalize(q, dim=-1), F.normalize(k, dim=-1), None
        logits, exponent = q, k
        if "query" not in self.folded:
            logits = q @ self.key_landmarks.to(q.dtype).mT
            exponent = by_query_head(k, self.query_landmarks.to(q.dtype).mT).sub_(self.shift.to(q.dtype))
        psi_q = logits.softmax(-1)
        log_sum = logits.amax(-1, keepdim=True) - psi_q.amax(-1, keepdim=True).log()
        return psi_q, exponent.clamp(max=EXPONENT_LIMIT).exp_(), log_sum

    def projections(self, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """We and Wr as the features meet them: (H, p, s) fixed, (B, H, d, s) sampled (equation 5, f(X) = values)."""
        We, Wr = self.We.to(v.dtype), self.Wr.to(v.dtype)
        if self.settings.nonnegative:
            return We.abs(), Wr.abs()  # the absolute value keeps them so under any optimiser
        if self.settings.weights == "fixed":
            return We, Wr
        index, used = self.sampled(v.shape[-2], valid, v.device)
        rows = v.gather(2, index[:, None, :, None].expand(*v.shape[:2], -1, v.shape[-1]))
        rows = (rows * used[:, None, :, None]).mT
        return by_query_head(rows, We), by_query_head(rows, Wr)

    def sampled(self, tokens: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which token each row of We meets, and whether any, (B or 1, n): as `sample_positions`, or official."""
        slots = self.We.shape[1]
        if not self.settings.official_sampling:
            return sample_positions(tokens, slots, valid, device)
        index = torch.linspace(0, tokens - 1, slots, dtype=torch.int64, device=device)[None]
        return index.expand(1 if valid is None else len(valid), -1), torch.ones_like(index, dtype=torch.bool)

    def objectives(self, scores: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """J of every sequence and how many tokens it has, both (B,).

        J = far * (1/2 mean ||Lambda e||^2 + 1/2 mean ||Lambda r||^2 - mean_heads Tr(We^T coupling Wr))

        with far as in `far_share`.

        Args:
            scores: [e; r], (B, H, N, 2s), zero at padding.
            valid: (B, N) bool or None; the means run over valid tokens only.

        Source: equation 10, with the official code's conventions (Lambda enters squared, token means). Ours are the
        coupling of the two feature spaces, the identity for the paper's forms, and `far`, 1 for them.
        """
        tokens = torch.full_like(scores[:, 0, 0, 0], scores.shape[2])
        if valid is not None:
            tokens = valid.sum(-1).to(scores.dtype).expand_as(tokens)
        squares = scores.square().sum(2) / tokens.clamp(min=1)[:, None, None]  # (B, H, 2s)
        energy = 0.5 * (squares.unflatten(-1, (2, -1)).sum(-2) * self.Lambda.to(scores.dtype).square()).sum(-1)
        return self.far_share(tokens) * (energy - self.traces(scores.dtype).sum(-1)).mean(-1), tokens

    def far_share(self, tokens: Tensor) -> Tensor:
        """The share of a sequence's pairs that the low-rank kernel stands for, (1 - window / N)^2; N is `tokens`.

        1 without a band; 0 where the band covers the whole sequence and the kernel has no part in the output.
        """
        return (1 - (self.settings.window or 0) / tokens.clamp(min=1)).clamp(min=0).square()

    def keep(self, objectives: Tensor, tokens: Tensor) -> None:
        """Note what `objectives` gave.

        The forward of a model takes the mean over sequences of J^2: with J of each sequence, not of the batch, the
        loss does not depend on how a batch is cut, into accumulated parts or over processes. A layer on its own keeps
        J of all tokens. What gradient checkpointing computes again is dropped.

        Source: J^2 per sequence as in the official time series, translation and reinforcement learning code.
        """
        if self.alone:
            self.last = (objectives * tokens).sum() / tokens.sum().clamp(min=1)
            return
        counted = (tokens > 0).to(objectives.dtype)  # not sequences of padding alone
        square = (objectives.square() * counted).sum() / counted.sum().clamp(min=1)
        if self.squares is not None:
            self.squares.append(square)

    def traces(self, dtype: torch.dtype) -> Tensor:
        """The diagonal of We^T coupling Wr, (H, s); coupling is the identity for sampled weights."""
        We, Wr = self.We.to(dtype), self.Wr.to(dtype)
        if self.settings.nonnegative:
            We, Wr = We.abs(), Wr.abs()
        if self.settings.weights == "fixed":
            Wr = self.coupling.to(dtype) @ Wr
        return (We * Wr).sum(-2)


class UnitScores(torch.autograd.Function):
    """x W / ||x||, with a backward pass that writes the gradient of x in one go."""

    @staticmethod
    def forward(x: Tensor, W: Tensor, length: Tensor) -> Tensor:
        """X (..., N, d), W (..., d, s), length (..., N, 1), which is the norm of x; all but d, s and N broadcast."""
        return (x @ W).div_(length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep all of it."""
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = x W / l: dx = (dy W^T - (dy . y) x / l) / l, dW = x^T (dy / l)."""
        x, W, length, output = ctx.saved_tensors
        grad = grad / length
        radial = (grad * output).sum(-1, keepdim=True).div_(length)
        of_x = torch.addcmul(grad @ W.mT, x, radial, value=-1)
        return of_x.sum_to_size(x.shape), (x.mT @ grad).sum_to_size(W.shape), None


def unit_scores(x: Tensor, W: Tensor) -> Tensor:
    """W^T x / ||x||, the scores of the paper's features: x (..., N, d) by W (..., d, s) gives (..., N, s)."""
    length = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True).clamp(min=1e-12)
    scores: Tensor = UnitScores.apply(x, W, length)
    return scores


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


def by_query_head(k: Tensor, maps: Tensor) -> Tensor:
    """Keys (B, G, N, d) by the map of every query head, (H, d, n) or (B, H, d, n): (B, H, N, n)."""
    if k.shape[1] == maps.shape[-3]:
        return k @ maps
    return (k.unsqueeze(2) @ maps.unflatten(-3, (k.shape[1], -1))).flatten(1, 2)


def tiles(x: Tensor, by_rows: int, by_heads: int, axis: int) -> list[Tensor]:
    """X in parts of so many sequences and, along `axis`, so many heads; the reverse of `tiled`."""
    return [part for strip in x.split(by_rows) for part in strip.split(by_heads, axis)]


def tiled(parts: Sequence[Tensor], by_rows: int, axis: int) -> Tensor:
    """Parts in order, `by_rows` of them side by side along `axis` for the same sequences."""
    rows = [torch.cat(list(parts[i : i + by_rows]), axis) for i in range(0, len(parts), by_rows)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
