"""Observed attention to weights, in closed form: landmarks, truncated SVD, non-negative factors, ridge read-out.

Letters: H heads, N tokens, d head dim, p feature dim, s rank. Statistics and solves are float64 (float32 where the
device has no float64). Memory: the statistics, and one chunk of attention rows.

Source: the SVD view is the paper's (theorem 3.2), seen through the features; the fit to observed attention, the
non-negative factors (NNDSVD start, multiplicative updates) and the read-out are ours.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_primal.modeling.primal_attention import PrimalAttention, sample_positions
from hf_primal.observe import States

FLOOR = 1e-6  # eigenvalues below this part of the largest count as noise
RIDGE = 1e-2  # ridge strength relative to the mean power
ROWS = 256  # attention rows held at once
UPDATES = 300  # multiplicative updates of the non-negative factors


def best_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class LandmarkSample:
    """Random scaled queries and keys of one layer, (H, M, d) each, to place landmarks among."""

    per_batch: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        """Start empty."""
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []

    def update(self, states: States) -> None:
        """Take at most `per_batch` valid tokens of one call."""
        where = states.valid.flatten().nonzero().squeeze(-1)
        where = where[torch.randperm(len(where), generator=self.generator)[: self.per_batch].to(where.device)]
        for kept, points in ((self.queries, states.query * states.scaling), (self.keys, states.key)):
            kept.append(points.transpose(0, 1).flatten(1, 2)[:, where].float())


def k_means(points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """Cluster centres of each head's points: Lloyd's algorithm from a k-means++ start.

    Args:
        points: (H, M, d) with M >= 1; with fewer points than clusters, points are repeated with a little noise.
        clusters: centres per head, >= 1.
        generator: CPU generator for the start.
        iterations: of Lloyd's algorithm; an empty cluster keeps its centre.

    Returns:
        (H, clusters, d).
    """
    short = -(-clusters // points.shape[1])
    if short > 1:
        noise = torch.randn((points.shape[0], points.shape[1] * short, points.shape[2]), generator=generator)
        points = points.repeat(1, short, 1) + noise.to(points) * points.std().nan_to_num(0.0).clamp(min=1e-2) * 0.1
    centres = points[:, :0]
    distance = torch.ones_like(points[..., 0])
    for _ in range(clusters):  # the next one with a chance that grows with the squared distance from those chosen
        reach = distance.cumsum(-1)
        draw = torch.rand(len(points), 1, generator=generator).to(points.device) * reach[:, -1:]
        chosen = torch.searchsorted(reach, draw).clamp(max=points.shape[1] - 1)
        centre = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
        centres = torch.cat([centres, centre], 1)
        nearest = (points - centre).square().sum(-1)
        distance = nearest if len(centres[0]) == 1 else torch.minimum(distance, nearest)
    for _ in range(iterations):
        member = torch.zeros(*points.shape[:2], clusters, device=points.device)
        member.scatter_(-1, torch.cdist(points, centres).argmin(-1, keepdim=True), 1.0)
        size = member.sum(1).unsqueeze(-1)
        centres = torch.where(size > 0, (member.mT @ points) / size.clamp(min=1.0), centres)
    return centres


def place_landmarks(primal: PrimalAttention, sample: LandmarkSample) -> None:
    """Set the landmarks of one layer, and the shift that gives each key feature mean 1 on the sample."""
    queries, keys = torch.cat(sample.queries, 1), torch.cat(sample.keys, 1)
    count = primal.key_landmarks.shape[1]
    key_landmarks, query_landmarks = (k_means(points, count, sample.generator) for points in (keys, queries))
    shift = (keys @ query_landmarks.mT).logsumexp(1, keepdim=True) - math.log(keys.shape[1])
    with torch.no_grad():
        primal.key_landmarks.copy_(key_landmarks)
        primal.query_landmarks.copy_(query_landmarks)
        primal.shift.copy_(shift)


class Moments:
    """Streaming statistics of one layer's observed attention, seen through the features.

    T_ij is what the far kernel has to be: exp(q_i . k_j - log_sum_i) for far pairs and 0 in the band for
    non-negative factors, N_i A_ij (A the softmax attention) for signed ones. Sums run over valid pairs:
    cross = sum psi_q T psi_k^T, gram_q = sum psi_q psi_q^T weighted by each row's far partners, gram_k likewise,
    all (H, p, p); energy = sum T^2, (H,).
    """

    def __init__(self, primal: PrimalAttention) -> None:
        self.primal = primal
        heads, dim = primal.We.shape[:2]
        exact = {"dtype": best_float(primal.We.device), "device": primal.We.device}
        self.cross, self.gram_q, self.gram_k = (torch.zeros(heads, dim, dim, **exact) for _ in range(3))  # type: ignore[call-overload]
        self.energy = torch.zeros(heads, **exact)  # type: ignore[call-overload]
        self.pairs = 0.0

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        settings = self.primal.settings
        precise = torch.promote_types(states.query.dtype, torch.float32)
        q, k = states.query.to(precise) * states.scaling, states.key.to(precise)
        psi_q, psi_k, log_sum = self.primal.feature_maps(q, k)
        hidden = ~states.valid[:, None, :, None]
        psi_q, psi_k = psi_q.masked_fill(hidden, 0.0), psi_k.masked_fill(hidden, 0.0)
        positions = torch.arange(q.shape[-2], device=q.device)
        far = (positions[:, None] - positions).abs() >= (settings.window or 0)
        far = far & states.valid[:, None, :] & states.valid[:, :, None]  # (B, N, N) of booleans
        for rows in positions.split(ROWS):
            scores = q[:, :, rows] @ k.mT
            hide = ~far[:, None, rows]
            if settings.nonnegative:
                target = (scores - log_sum[:, :, rows]).masked_fill(hide, float("-inf")).clamp(max=30.0).exp()  # type: ignore[index]
            else:
                attention = scores.masked_fill(hide, torch.finfo(precise).min).softmax(-1)
                target = (attention * states.valid.sum(-1)[:, None, None, None]).masked_fill(hide, 0.0)
            self.cross += (psi_q[:, :, rows].mT @ (target @ psi_k)).sum(0)
            self.energy += target.square().sum((0, 2, 3))
        partners = far.sum(-1).to(precise)[:, None, :, None]
        self.gram_q += ((psi_q * partners).mT @ psi_q).sum(0)
        self.gram_k += ((psi_k * partners).mT @ psi_k).sum(0)
        self.pairs += float(partners.sum())


def roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of symmetric positive matrices, eigenvalues floored relative to the largest."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=(values[..., -1:] * FLOOR).clamp(min=torch.finfo(gram.dtype).tiny))
    root = values.sqrt().unsqueeze(-2)
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def singular_factors(moments: Moments, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rank-s truncated SVD of the observed attention in feature space.

    Args:
        moments: of one layer.
        rank: s, 1..p.

    Returns:
        We = C_q^{-1/2} U_s S_s^{1/2} and Wr = C_k^{-1/2} V_s S_s^{1/2}, (H, p, s); all singular values (H, p).

    Source: theorem 3.2 (singular vectors of the kernel); the whitening by the features' second moments is ours.
    """
    _, white_q = roots(moments.gram_q / moments.pairs)
    _, white_k = roots(moments.gram_k / moments.pairs)
    U, S, V = truncated_svd(white_q @ (moments.cross / moments.pairs) @ white_k)
    root = S[:, None, :rank].sqrt()
    return white_q @ U[..., :rank] * root, white_k @ V[..., :rank] * root, S


def nonnegative_factors(moments: Moments, We: Tensor, Wr: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest non-negative factors: NNDSVD start from the signed ones, then multiplicative updates.

    The updates lower || Psi_q We Wr^T Psi_k^T - T ||^2, which the moments give without the data.
    """
    parts = [(We.clamp(min=0), Wr.clamp(min=0)), ((-We).clamp(min=0), (-Wr).clamp(min=0))]
    sizes = [w.square().sum(-2, keepdim=True) * r.square().sum(-2, keepdim=True) for w, r in parts]
    We, Wr = (torch.where(sizes[0] >= sizes[1], plus, minus) for plus, minus in zip(*parts, strict=True))
    We, Wr = (w + 1e-2 * w.mean((-2, -1), keepdim=True) + 1e-12 for w in (We, Wr))  # a zero could never grow
    cross, gram_q, gram_k = (x / moments.pairs for x in (moments.cross, moments.gram_q, moments.gram_k))
    for _ in range(UPDATES):
        We = We * (cross @ Wr) / (gram_q @ We @ (Wr.mT @ gram_k @ Wr)).clamp(min=1e-30)
        Wr = Wr * (cross.mT @ We) / (gram_k @ Wr @ (We.mT @ gram_q @ We)).clamp(min=1e-30)
    e_power, r_power = (w.mul(gram @ w).sum(-2, keepdim=True) for w, gram in ((We, gram_q), (Wr, gram_k)))
    balance = (r_power / e_power.clamp(min=1e-30)).clamp(1e-12, 1e12) ** 0.25
    return We * balance, Wr / balance


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


class SlotMoments:
    """Streaming mean of the observed attention between the sampled positions, for the paper's sampled weights."""

    def __init__(self, primal: PrimalAttention) -> None:
        heads, slots = primal.We.shape[:2]
        exact = {"dtype": best_float(primal.We.device), "device": primal.We.device}
        self.total, self.count = torch.zeros(heads, slots, slots, **exact), torch.zeros(slots, slots, **exact)  # type: ignore[call-overload]

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        q, k = states.query.float() * states.scaling, states.key.float()
        index, used = sample_positions(q.shape[-2], len(self.count), states.valid, q.device)
        rows = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))
        scores = (rows @ k.mT).masked_fill(~states.valid[:, None, None], torch.finfo(q.dtype).min)
        columns = index[:, None, None].expand(-1, *scores.shape[1:3], -1)
        pairs = (used[:, :, None] & used[:, None]).to(q.dtype)
        self.total += (scores.softmax(-1).gather(-1, columns) * pairs[:, None]).sum(0)
        self.count += pairs.sum(0)


def truncated_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V of finite matrices; through the eigenvectors of A^T A, with a warning, where the SVD does not converge."""
    try:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        return U, S, Vh.mT
    except torch.linalg.LinAlgError:
        warnings.warn("the SVD did not converge; using the eigenvectors of A^T A, good to half the digits", stacklevel=2)
        values, V = torch.linalg.eigh(matrix.mT @ matrix)
        S, V = values.clamp(min=0).sqrt().flip(-1), V.flip(-1)
        return (matrix @ V) / S.clamp(min=1e-30).unsqueeze(-2), S, V


def fit_factors(primal: PrimalAttention, moments: "Moments | SlotMoments") -> tuple[Tensor, float]:
    """Write We and Wr into the layer.

    Returns:
        Singular values of the observed attention, (H, p or slots), largest first, and the part of its energy (sum
        of squares) that the rank keeps, 0..1, mean over heads: for fixed weights of all that was observed, so that
        what the features cannot express counts as lost.

    Raises:
        ValueError: no far pairs were seen, or the attention was not finite.
    """
    rank = primal.settings.rank
    if isinstance(moments, SlotMoments):
        U, S, V = truncated_svd(moments.total / moments.count.clamp(min=1))
        We, Wr = V[..., :rank], U[..., :rank]
        Wr = Wr * torch.where((We * Wr).sum(-2, keepdim=True) < 0, -1.0, 1.0)  # W_o absorbs the sign; J needs the trace
        kept, observed = S[:, :rank].square().sum(-1), S.square().sum(-1)
    else:
        if not moments.pairs:
            raise ValueError(
                f"every calibration passage is shorter than the window of {primal.settings.window} tokens, so there is "
                "no far attention to learn from; give longer passages or use --window 0"
            )
        if not moments.cross.isfinite().all():
            raise ValueError("the observed attention is not finite; try --dtype float32")
        We, Wr, S = singular_factors(moments, rank)
        kept, observed = S[:, :rank].square().sum(-1), moments.energy / moments.pairs
        if primal.settings.nonnegative:
            We, Wr = nonnegative_factors(moments, We, Wr)
    with torch.no_grad():
        primal.We.copy_(We)
        primal.Wr.copy_(Wr)
    return S, float((kept / observed.clamp(min=1e-30)).clamp(max=1.0).mean())


class Readout:
    """Streaming ridge regression of the teacher's head outputs on [c, e, r, 1], per head."""

    def __init__(self, primal: PrimalAttention) -> None:
        self.primal = primal
        heads, dim = primal.Lambda.shape[0], primal.out_map.shape[-1]
        self.context = dim if primal.settings.readout == "values" else 0
        size = self.context + 2 * primal.settings.rank + 1
        exact = {"dtype": best_float(primal.We.device), "device": primal.We.device}
        self.gram = torch.zeros(heads, size, size, **exact)  # type: ignore[call-overload]
        self.cross = torch.zeros(heads, size, dim, **exact)  # type: ignore[call-overload]
        self.power = torch.zeros(heads, **exact)  # type: ignore[call-overload]
        self.squares = torch.zeros(heads, 2 * primal.settings.rank, **exact)  # type: ignore[call-overload]
        self.features = None
        if primal.settings.weights == "fixed":
            self.features = [torch.zeros_like(primal.coupling, **exact) for _ in range(2)]

    def update(self, states: States) -> None:
        """Add one call of the layer."""
        context, scores = self.primal.context_and_scores(
            states.query, states.key, states.value, states.valid, states.scaling
        )
        self.squares += scores.square().sum((0, 2))  # zero at padding
        if self.features is not None:
            q, k = states.query.float() * states.scaling, states.key.float()
            hidden = ~states.valid[:, None, :, None]
            for gram, psi in zip(self.features, self.primal.feature_maps(q, k), strict=False):
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

    def solve(self) -> float:
        """Write W_v, W_o, b, coupling and Lambda into the layer; the relative squared output error on what was seen.

        The ridge pulls towards the attention-like answer o = c (the values read-out) or 0 (the scores read-out).
        Lambda makes every component of J zero on the calibration tokens: Lambda^2 = 2 trace / (e^2 + r^2).
        """
        primal, c, s = self.primal, self.context, self.primal.settings.rank
        prior = torch.zeros_like(self.cross)
        prior[:, :c] = torch.eye(c, prior.shape[-1], dtype=prior.dtype, device=prior.device)
        gram, cross = self.gram, self.cross - self.gram @ prior
        if primal.settings.shared_out_map:
            gram, cross = gram.sum(0, keepdim=True), cross.sum(0, keepdim=True)
        blocks = gram.diagonal(dim1=-2, dim2=-1).split([c, s, s, 1], -1)  # each to its own mean power, not per column
        scale = torch.cat([x.mean(-1, keepdim=True).expand_as(x) if x.shape[-1] else x for x in blocks], -1)
        scale = scale.sqrt().clamp(min=1e-12).unsqueeze(-1)
        unit = gram / scale / scale.mT + RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        solution = prior + torch.linalg.solve(unit, cross / scale) / scale
        tokens = self.gram[:, -1, -1].unsqueeze(-1)
        squares = self.squares.unflatten(-1, (2, s)).sum(-2) / tokens
        with torch.no_grad():
            if self.features is not None:
                We, Wr = (w.detach().to(squares.dtype) for w in (primal.We, primal.Wr))
                factors = (We.abs(), Wr.abs()) if primal.settings.nonnegative else (We, Wr)
                primal.coupling.copy_(coupling_of(*self.features, *factors))
            trace = primal.traces(squares.dtype)
            if c:
                primal.value_map.copy_(solution[:, :c])
            shared = solution[:1] if primal.settings.shared_out_map else solution
            primal.out_map.copy_(shared[:, c:-1])
            primal.out_bias.copy_(shared[:, -1:])
            primal.Lambda.copy_((2 * trace / squares.clamp(min=1e-30)).clamp(min=0.0).sqrt())
        error = self.power - 2 * (solution * self.cross).sum((-2, -1)) + (solution * (self.gram @ solution)).sum((-2, -1))
        return float((error.sum() / self.power.sum().clamp(min=1e-30)).clamp(min=0.0))
