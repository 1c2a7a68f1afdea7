"""Applying S: to activations (Q′ = Q S), or ahead of time to the weights that make them (folding).

With head h's rows of a weight [out, in] written W_h [d_k, D], its query is q = W_h x and q S = (Sᵀ W_h) x. Sᵀ W_h has
d_k′ rows instead of d_k, so folding makes the projection free and the query/key GEMM narrower. It is exact, in training
too: autograd carries the gradient of Sᵀ W_h to both factors.

Shapes: H heads, G projections, each shared by H/G consecutive heads; head h uses S[h // (H // G)].
"""

import torch
from torch import Tensor


def fold_projection(weight: Tensor, projection: Tensor) -> Tensor:
    """Sᵀ W_h for every head: what a Linear layer followed by S computes, as one Linear layer.

    weight [H·d_k, D] or a bias [H·d_k]; projection S [G, d_k, d_k′], cast to weight's dtype, G divides H.
    Returns [H·d_k′, D] or [H·d_k′], differentiable to both. Raises ValueError for shapes that do not fit.
    """
    groups, d_k, _ = projection.shape
    if weight.dim() not in (1, 2) or weight.shape[0] % (groups * d_k):
        raise ValueError(
            f"weight {list(weight.shape)} does not hold whole heads of d_k = {d_k} for {groups} projection(s): "
            f"its first dimension must be a multiple of {groups * d_k}"
        )
    w_ghkd = weight.reshape(groups, -1, d_k, weight.shape[1:].numel())
    folded_ghpd = projection.to(weight.dtype).mT.unsqueeze(1) @ w_ghkd
    return folded_ghpd.reshape(-1, *weight.shape[1:])


def project(x: Tensor, projection: Tensor) -> Tensor:
    """Q′ = Q S, head by head (Section 3.1.2): the unfolded path.

    x [..., H, d_k]; projection S [G, d_k, d_k′], cast to x's dtype, G divides H. Returns [..., H, d_k′].
    Raises ValueError for shapes that do not fit.
    """
    groups, d_k, _ = projection.shape
    if x.shape[-1] != d_k or x.shape[-2] % groups:
        raise ValueError(f"x ends in [heads, width] = {list(x.shape[-2:])}, but S is {groups} projection(s) of width {d_k}")
    x_ghk = x.unflatten(-2, (groups, -1))
    return torch.einsum("...ghk,gkp->...ghp", x_ghk, projection.to(x.dtype)).flatten(-3, -2)


def on_support(projection: Tensor) -> Tensor:
    """S with its zeros pinned: the value is S, the gradient reaches the non-zeros only (∇_W = M ⊙ ∇_S, M = [S ≠ 0]).

    A trainable S stays as sparse as it was drawn: zero entries get a zero gradient, which no optimizer moves.
    """
    return projection * (projection.detach() != 0)
