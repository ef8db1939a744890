"""Streaming statistics of the observed attention; never more of it in memory than a chunk of rows.

Letters: H heads, N tokens, d head dim, p feature dim, s rank. Sums are float64 (float32 where the device has none).
"""

import torch
from torch import Tensor

from hf_primal.modeling.primal_attention import EXPONENT_LIMIT, PrimalAttention
from hf_primal.observe import States

CHUNK = 2**24  # entries of the attention matrix held at once


def exact_zeros(primal: PrimalAttention, *shape: int) -> Tensor:
    """Where a sum starts: float64 on the layer's device, or float32 where the device has no float64."""
    device = primal.We.device
    return torch.zeros(shape, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def scaled_states(states: States) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys, each (B, H, N, d) in float32 or better, zero at padding."""
    precise = torch.promote_types(states.query.dtype, torch.float32)
    groups, hidden = states.query.shape[1] // states.key.shape[1], ~states.valid[:, None, :, None]
    q, k = states.query.to(precise) * states.scaling, states.key.to(precise).repeat_interleave(groups, 1)
    return q.masked_fill(hidden, 0.0), k.masked_fill(hidden, 0.0)


class Moments:
    """Streaming statistics of one layer's observed attention, seen through the features.

    T_ij is what the far kernel has to be: exp(q_i . k_j - log_sum_i) for far pairs and 0 in the band for
    non-negative factors, N_i A_ij (A the softmax attention, N_i the keys that row i sees) for signed ones. Sums run
    over valid far pairs in sight, each with the weight of its row: cross = sum psi_q T psi_k^T, gram_q = sum psi_q
    psi_q^T, gram_k = sum psi_k psi_k^T, all (H, p, p); energy = sum T^2, (H,); pairs = sum 1, (H, 1, 1).
    The weight is 1, and in causal layers with non-negative factors, whose rows see between one key and N, one over
    the row's softmax sum: half way between errors in units of exp(q . k) and in units of attention.
    """

    def __init__(self, primal: PrimalAttention) -> None:
        self.primal = primal
        heads, dim = primal.We.shape[:2]
        self.cross, self.gram_q, self.gram_k = (exact_zeros(primal, heads, dim, dim) for _ in range(3))
        self.energy = exact_zeros(primal, heads)
        self.pairs = exact_zeros(primal, heads, 1, 1)
        self.horizon: int | None = None

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        settings = self.primal.settings
        q, k = scaled_states(states)
        psi_q, psi_k, log_sum = self.primal.feature_maps(*self.primal.averaged(q, k, states.valid, states.causal))
        hidden = ~states.valid[:, None, :, None]
        psi_q, psi_k = psi_q.masked_fill(hidden, 0.0), psi_k.masked_fill(hidden, 0.0)
        seers = torch.zeros_like(k[..., 0])
        for rows in torch.arange(q.shape[-2], device=q.device).split(max(CHUNK // (q[..., 0].numel()), 1)):
            offset, seen = states.sight(rows)
            far = (seen & (offset.abs() >= (settings.window or 0)))[:, None]
            scores, partners = states.logits(q[:, :, rows], k, offset), far.sum(-1, keepdim=True).to(q.dtype)
            weight = torch.ones_like(scores[..., :1])
            if settings.nonnegative:
                assert log_sum is not None
                exponent = scores - log_sum[:, :, rows]
                target = exponent.clamp(max=EXPONENT_LIMIT).exp().masked_fill(~far, 0.0)
                if states.causal:
                    total = exponent.masked_fill(~seen[:, None], torch.finfo(q.dtype).min).logsumexp(-1, keepdim=True)
                    weight = (-total.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)).exp()
            else:
                attention = scores.masked_fill(~far, torch.finfo(q.dtype).min).softmax(-1)
                target = (attention * partners).masked_fill(~far, 0.0)
            psi_rows = psi_q[:, :, rows] * weight
            self.cross += (psi_rows.mT @ (target @ psi_k)).sum(0)
            self.gram_q += ((psi_rows * partners).mT @ psi_q[:, :, rows]).sum(0)
            self.energy += (target.square() * weight).sum((0, 2, 3))
            self.pairs += (partners * weight).sum((0, 2)).unsqueeze(-1)
            seers += (weight.mT @ far.to(q.dtype)).squeeze(-2)
        self.gram_k += ((psi_k * seers.unsqueeze(-1)).mT @ psi_k).sum(0)
        self.horizon = states.horizon


class SlotMoments:
    """Streaming mean of N_i A_ij between the sampled positions, for the paper's sampled weights."""

    horizon = None  # sampled weights see the whole sequence

    def __init__(self, primal: PrimalAttention) -> None:
        self.primal = primal
        heads, slots = primal.We.shape[:2]
        self.total, self.count = exact_zeros(primal, heads, slots, slots), exact_zeros(primal, slots, slots)

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        q, k = scaled_states(states)
        index, used = self.primal.sampled(q.shape[-2], states.valid, q.device)
        rows = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))
        self.primal.check_sight(states.causal, states.horizon)
        scores = (rows @ k.mT).masked_fill(~states.valid[:, None, None], torch.finfo(q.dtype).min)
        columns = index[:, None, None].expand(-1, *scores.shape[1:3], -1)
        pairs = (used[:, :, None] & used[:, None]).to(q.dtype)
        target = scores.softmax(-1) * states.valid.sum(-1)[:, None, None, None]  # N A: alike for all lengths
        self.total += (target.gather(-1, columns) * pairs[:, None]).sum(0)
        self.count += pairs.sum(0)
