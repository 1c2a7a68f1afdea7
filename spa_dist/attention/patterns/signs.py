"""Random signs on a support: how most patterns become a projection."""

import torch
from torch import Generator, Tensor


def random_signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Independent ±1 with equal probability, float64 on CPU."""
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(torch.float64) * 2 - 1


def signed(support: Tensor, generator: Generator) -> Tensor:
    """S_ij = ±1/√nnz(row i) on the support, the signs independent of it and of each other. float64, support's shape.

    E[S Sᵀ] = I, whatever the support: a row of n non-zeros of size 1/√n has norm 1, exactly; and for i ≠ i' every term of
    (S Sᵀ)_ii' = Σ_j S_ij S_i'j is a product of two independent signs, with mean zero given the support.
    """
    nonzeros = support.sum(dim=-1, keepdim=True).to(torch.float64)
    return support * random_signs(tuple(support.shape), generator) / nonzeros.sqrt()
