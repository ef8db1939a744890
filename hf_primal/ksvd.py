"""The asymmetric kernel SVD on its own: of any kernel matrix, or of attention; primal and dual, and new points.

Letters: N queries, M keys, p feature dim, n rows of F, s rank; all take leading batch dimensions (heads, say).
The scores are e, (N, s), and r, (M, s), as in the layer.

Source: Primal-Attention, arXiv:2305.19798, section 3; the numbers of equations and theorems are the paper's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KernelSVD:
    """The s largest singular triplets of a kernel: K H_r = H_e Sigma and K^T H_e = H_r Sigma (theorem 3.2).

    Attributes:
        H_e: left singular vectors, the dual variables of the queries, (..., N, s), orthonormal columns.
        H_r: right singular vectors, the dual variables of the keys, (..., M, s), orthonormal columns.
        sigma: singular values, (..., s), largest first; Lambda = Sigma^{-1}.
        energy: the part of the kernel's sum of squares that they hold, (...), 0..1.
    """

    H_e: Tensor
    H_r: Tensor
    sigma: Tensor
    energy: Tensor


def attention_kernel(query: Tensor, key: Tensor, scaling: float | None = None, causal: bool = False) -> Tensor:
    """Softmax attention as an asymmetric kernel, (..., N, M) from (..., N, d) and (..., M, d).

    Args:
        query: q.
        key: k.
        scaling: of q . k, d ** -0.5 when None.
        causal: a query sees no later key.
    """
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


def kernel_svd(kernel: Tensor, rank: int) -> KernelSVD:
    """The solution of the dual problem (theorem 3.2): the truncated SVD of the kernel.

    Args:
        kernel: K, (..., N, M).
        rank: s, 1..min(N, M).

    Raises:
        ValueError: a rank out of range.
    """
    if not 1 <= rank <= min(kernel.shape[-2:]):
        raise ValueError(f"rank must be 1..{min(kernel.shape[-2:])}, got {rank}")
    U, S, Vh = torch.linalg.svd(kernel, full_matrices=False)
    total = S.square().sum(-1).clamp(min=torch.finfo(S.dtype).tiny)
    return KernelSVD(U[..., :rank], Vh.mT[..., :rank], S[..., :rank], S[..., :rank].square().sum(-1) / total)


def primal_weights(phi_q: Tensor, phi_k: Tensor, solution: KernelSVD, F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """We and Wr from the dual variables: W_e = sum_j F phi_k(x_j) h_rj^T, W_r = sum_i F phi_q(x_i) h_ei^T (A.1, KKT).

    Args:
        phi_q: features of the queries, (..., N, p).
        phi_k: features of the keys, (..., M, p), such that K = phi_q F^T F phi_k^T.
        solution: of that kernel.
        F: f(X), (..., n, p), for weights that depend on the data; None is the identity.

    Returns:
        (..., n, s) each; n is p without F.
    """
    We, Wr = phi_k.mT @ solution.H_r, phi_q.mT @ solution.H_e
    return (We, Wr) if F is None else (F @ We, F @ Wr)


def primal_scores(phi: Tensor, W: Tensor, F: Tensor | None = None) -> Tensor:
    """e(x) = W_{e|X}^T phi_q(x), or r(x) = W_{r|X}^T phi_k(x), of any points (equation 8, primal).

    Args:
        phi: features, (..., N, p).
        W: We or Wr, (..., n, s).
        F: f(X), (..., n, p), or None for the identity; W_{.|X} = F^T W.

    Returns:
        (..., N, s).
    """
    return phi @ (W if F is None else F.mT @ W)


def dual_scores(kernel: Tensor, H: Tensor) -> Tensor:
    """e(x) = sum_j h_rj kappa(x, x_j), or r(x) = sum_i h_ei kappa(x_i, x), of any points (equation 8, dual).

    Args:
        kernel: kappa(x, x_j), (..., new, M), with H_r; or kappa(x_i, x) transposed, (..., new, N), with H_e.
        H: dual variables.

    Returns:
        (..., new, s).
    """
    return kernel @ H


def objective(e: Tensor, r: Tensor, We: Tensor, Wr: Tensor, Lambda: Tensor) -> Tensor:
    """J = 1/2 sum_i e_i^T Lambda e_i + 1/2 sum_j r_j^T Lambda r_j - Tr(We^T Wr), as the paper has it (equation 6).

    0 at every stationary solution (lemma 4.2), and elsewhere too: J = 0 does not make singular vectors. The layer's J
    follows the official code instead: the stored Lambda enters squared, and means over tokens take the sums' place.

    Args:
        e: (..., N, s).
        r: (..., M, s).
        We: (..., n, s), not transformed by F.
        Wr: likewise.
        Lambda: (..., s), positive; Sigma^{-1} at the solution.

    Returns:
        (...).
    """
    energy = (e.square().sum(-2) + r.square().sum(-2)) * Lambda / 2
    return energy.sum(-1) - (We * Wr).sum((-2, -1))
