"""The read-out in closed form: ridge regression of the teacher's head outputs, and Lambda and coupling for J = 0.

Letters: H heads, d head dim, p feature dim, s rank. Source: ours; J is equation 10 of the paper.
"""

import torch
from torch import Tensor

from hf_primal.factors import FLOOR
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.moments import exact_zeros, scaled_states
from hf_primal.observe import States

RIDGE = 1e-2  # ridge strength relative to the mean power


def coupling_of(gram_q: Tensor, gram_k: Tensor, We: Tensor, Wr: Tensor) -> Tensor:
    """Generalised inverse, transposed, of We Wr^T in the metric of the features, so that We^T coupling Wr = I.

    Args:
        gram_q: second moments of psi_q, (H, p, p), at any scale.
        gram_k: of psi_k.
        We: (H, p, s); directions that carry next to nothing are left out of the identity.
        Wr: likewise.
    """
    left, right = gram_q @ We, gram_k @ Wr
    inverse_e, inverse_r = (torch.linalg.pinv(x, rtol=FLOOR, hermitian=True) for x in (We.mT @ left, Wr.mT @ right))
    return left @ inverse_e @ inverse_r @ right.mT


class Readout:
    """Streaming ridge regression of the teacher's head outputs on [c, e, r, 1], per head."""

    def __init__(self, primal: PrimalAttention) -> None:
        self.primal = primal
        heads, dim = primal.Lambda.shape[0], primal.out_map.shape[-1]
        self.context = dim if primal.settings.readout == "values" else 0
        size = self.context + 2 * primal.settings.rank + 1
        self.gram, self.cross = exact_zeros(primal, heads, size, size), exact_zeros(primal, heads, size, dim)
        self.power, self.squares = exact_zeros(primal, heads), exact_zeros(primal, heads, 2 * primal.settings.rank)
        self.tokens = exact_zeros(primal)  # each with its sequence's share of far pairs, as in `squares`
        self.features: tuple[Tensor, Tensor] | None = None
        if primal.settings.weights == "fixed":
            shape = primal.coupling.shape
            self.features = exact_zeros(primal, *shape), exact_zeros(primal, *shape)

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        context, scores = self.primal.context_and_scores(**states.inputs())
        tokens = states.valid.sum(-1).to(self.gram.dtype)
        far = self.primal.far_share(tokens).clamp(min=FLOOR)  # all alike where the band covers every sequence
        self.squares += (far[:, None, None] * scores.square().sum(2)).sum(0)  # zero at padding
        self.tokens += (far * tokens).sum()
        if self.features is not None:
            averaged = self.primal.averaged(*scaled_states(states), states.valid, states.causal)
            psi_q, psi_k, _ = self.primal.feature_maps(*averaged)
            hidden = ~states.valid[:, None, :, None]
            for gram, psi in zip(self.features, (psi_q, psi_k), strict=True):
                psi = psi.masked_fill(hidden, 0.0)
                gram += (psi.mT @ psi).sum(0)
        ones = torch.ones_like(scores[..., :1])
        scores = self.primal.readable(scores)
        seen = torch.cat([scores, ones] if context is None else [context, scores, ones], -1)
        mask = states.valid.flatten()
        seen, answer = (x.transpose(0, 1).flatten(1, 2)[:, mask].to(self.gram.dtype) for x in (seen, states.output))
        self.gram += seen.mT @ seen
        self.cross += seen.mT @ answer
        self.power += answer.square().sum((-2, -1))

    @torch.no_grad()
    def solve(self) -> float:
        """Write W_v, W_o, b, coupling and Lambda into the layer; the relative squared output error on what was seen."""
        primal, solution = self.primal, self.solution()
        if self.context:
            primal.value_map.copy_(solution[:, : self.context])
        shared = solution[:1] if primal.settings.shared_out_map else solution
        primal.out_map.copy_(shared[:, self.context : -1])
        primal.out_bias.copy_(shared[:, -1:])
        self.zero_objective()
        explained = (solution * (2 * self.cross - self.gram @ solution)).sum((-2, -1))
        return float(((self.power - explained).sum() / self.power.sum().clamp(min=1e-30)).clamp(min=0.0))

    def solution(self) -> Tensor:
        """Coefficients of [c, e, r, 1], (H, d + 2s + 1, d), without the first d rows for the scores read-out.

        The ridge pulls towards the attention-like answer o = c, or 0 for the scores read-out; c, e and r are each
        scaled by their own mean power.
        """
        c, s = self.context, self.primal.settings.rank
        prior = torch.zeros_like(self.cross)
        prior[:, :c] = torch.eye(c, prior.shape[-1], dtype=prior.dtype, device=prior.device)
        gram, cross = self.gram, self.cross - self.gram @ prior
        if self.primal.settings.shared_out_map:
            gram, cross = gram.sum(0, keepdim=True), cross.sum(0, keepdim=True)
        blocks = gram.diagonal(dim1=-2, dim2=-1).split([c, s, s, 1] if c else [s, s, 1], -1)
        scale = torch.cat([block.mean(-1, keepdim=True).expand_as(block) for block in blocks], -1)
        scale = scale.sqrt().clamp(min=1e-12).unsqueeze(-1)
        ridge = RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        lower = torch.linalg.cholesky(gram / scale / scale.mT + ridge)
        return prior + torch.cholesky_solve(cross / scale, lower) / scale

    def zero_objective(self) -> None:
        """Set the coupling, and Lambda so that every component of J is 0 here: Lambda^2 = 2 trace / (e^2 + r^2)."""
        primal = self.primal
        squares = self.squares.unflatten(-1, (2, -1)).sum(-2) / self.tokens
        if self.features is not None:
            We, Wr = primal.We.to(squares.dtype), primal.Wr.to(squares.dtype)
            if primal.settings.nonnegative:
                We, Wr = We.abs(), Wr.abs()
            primal.coupling.copy_(coupling_of(*self.features, We, Wr))
        trace = primal.traces(squares.dtype)
        primal.Lambda.copy_((2 * trace / squares.clamp(min=1e-30)).clamp(min=0.0).sqrt())
