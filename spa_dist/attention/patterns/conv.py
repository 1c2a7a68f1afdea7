"""Convolutional S: one random kernel slid along the features, its weights shared along the diagonal."""

import torch
from torch import Generator, Tensor

from spa_dist.attention.patterns.signs import random_signs


def conv_projection(
    d_k: int, d_proj: int, sparsity: float, generator: Generator, *, kernel_size: int | None = None
) -> tuple[Tensor, int]:
    """S_ij = κ_{i - s_j} / √c_i: κ a kernel of random signs, s_j = ⌊j d_k/d_k′⌋ its start in column j, c_i = nnz(row i).

    kernel_size, in features, sets the density in place of `sparsity`; without it, the size whose density is nearest to
    the one asked, at least ⌈d_k/d_k′⌉, the smallest that leaves no feature out. The kernel is cut off at the last feature.

    E[S Sᵀ] = I: (S Sᵀ)_ii' is a sum of κ_{i - s_j} κ_{i' - s_j} / √(c_i c_i'); for i ≠ i' each term pairs two different
    taps, independent with mean zero; for i = i' the c_i terms are 1/c_i each. Starts are distinct, so S is in echelon form
    and its rank is d_k′. Returns float64 [d_k, d_k′] and 0 (nothing needs repair). Raises ValueError for a size that
    leaves features out or exceeds d_k.
    """
    starts = torch.arange(d_proj, device="cpu") * d_k // d_proj
    smallest = -(-d_k // d_proj)
    if kernel_size is None:
        target = (1 - sparsity) * d_k * d_proj
        sizes = range(smallest, d_k + 1)
        kernel_size = min(sizes, key=lambda size: abs(int((d_k - starts).clamp(max=size).sum()) - target))
    elif type(kernel_size) is not int or not smallest <= kernel_size <= d_k:
        raise ValueError(f"kernel_size must be an integer from d_k/d_proj = {smallest} to d_k = {d_k}, not {kernel_size!r}")
    kernel = random_signs((kernel_size,), generator)
    tap = torch.arange(d_k, device="cpu")[:, None] - starts[None, :]
    inside = (tap >= 0) & (tap < kernel_size)
    values = kernel[tap.clamp(0, kernel_size - 1)] * inside
    return values / inside.sum(dim=1, keepdim=True).to(values.dtype).sqrt(), 0
