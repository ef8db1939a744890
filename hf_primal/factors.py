"""Observed attention to We and Wr: truncated SVD in feature space, and non-negative factors from it.

Letters: H heads, p feature dim, s rank.

Source: the singular vectors are the paper's (theorem 3.2); the whitening by the features' second moments and the
non-negative factors (NNDSVD start, multiplicative updates) are ours.
"""

import warnings

import torch
from torch import Tensor

from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.moments import Moments, SlotMoments

FLOOR = 1e-6  # eigenvalues below this part of the largest count as noise
UPDATES = 300  # multiplicative updates of the non-negative factors


def inverse_root(gram: Tensor) -> Tensor:
    """Inverse square root of symmetric matrices, their eigenvalues floored to a part of the largest."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=(values[..., -1:] * FLOOR).clamp(min=torch.finfo(gram.dtype).tiny))
    return (vectors / values.sqrt().unsqueeze(-2)) @ vectors.mT


def truncated_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V of finite matrices; from eigenvectors of A^T A, with a warning, where the SVD fails to converge."""
    try:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        return U, S, Vh.mT
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        warnings.warn(
            "the SVD did not converge; using the eigenvectors of A^T A, good to half the digits", stacklevel=2
        )
        values, V = torch.linalg.eigh(matrix.mT @ matrix)
        S, V = values.clamp(min=0).sqrt().flip(-1), V.flip(-1)
        return (matrix @ V) / S.clamp(min=1e-30).unsqueeze(-2), S, V


def singular_factors(moments: Moments, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rank-s truncated SVD of the observed attention in feature space.

    Args:
        moments: of one layer.
        rank: s, 1..p.

    Returns:
        We = C_q^{-1/2} U_s S_s^{1/2} and Wr = C_k^{-1/2} V_s S_s^{1/2}, (H, p, s); all singular values (H, p).

    Source: theorem 3.2 (singular vectors of the kernel); the whitening by the features' second moments is ours.
    """
    white_q, white_k = (inverse_root(gram / moments.pairs) for gram in (moments.gram_q, moments.gram_k))
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


def fit_factors(primal: PrimalAttention, moments: Moments | SlotMoments) -> Tensor:
    """Write We and Wr into the layer.

    Returns:
        The part of the observed attention's energy (sum of squares) in each singular component, (p or slots,),
        largest first, mean over heads. For fixed weights the rest to 1 is what the features cannot express.

    Raises:
        ValueError: no far pairs were seen, or the attention was not finite.
    """
    rank = primal.settings.rank
    if isinstance(moments, SlotMoments):
        U, S, V = truncated_svd(moments.total / moments.count.clamp(min=1))
        We, Wr = V[..., :rank], U[..., :rank]
        Wr = Wr * torch.where((We * Wr).sum(-2, keepdim=True) < 0, -1.0, 1.0)  # W_o absorbs the sign; J needs the trace
        observed = S.square().sum(-1)
    else:
        if moments.horizon is not None and moments.horizon <= (primal.settings.window or 0):
            with torch.no_grad():  # the band covers all that the layer sees
                primal.We.zero_()
                primal.Wr.zero_()
            return moments.energy.new_zeros(len(primal.We[0]))
        if not moments.pairs.all():
            raise ValueError(
                f"every calibration passage is shorter than the window of {primal.settings.window} tokens, so there is "
                "no far attention to learn from; give longer passages or use --window 0"
            )
        if not moments.cross.isfinite().all():
            raise ValueError("the observed attention is not finite; try --dtype float32")
        We, Wr, S = singular_factors(moments, rank)
        observed = moments.energy / moments.pairs.flatten()
        if primal.settings.nonnegative:
            We, Wr = nonnegative_factors(moments, We, Wr)
    with torch.no_grad():
        primal.We.copy_(We)
        primal.Wr.copy_(Wr)
    return (S.square() / observed.clamp(min=1e-30).unsqueeze(-1)).mean(0)
