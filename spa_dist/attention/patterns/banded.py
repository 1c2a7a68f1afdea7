"""Banded support: a band centred on the diagonal of the d_k × d_k′ rectangle."""

import torch
from torch import Generator, Tensor


def banded_support(
    d_k: int, d_proj: int, sparsity: float, generator: Generator, *, bandwidth: int | None = None
) -> tuple[Tensor, int]:
    """Row i holds the columns j with -w/2 ≤ j - c_i < w/2, where c_i = (i + ½) d_k′/d_k - ½ is the diagonal at row i.

    bandwidth w, in columns: w non-zeros a row, fewer where the band leaves the rectangle. When given, it sets the density
    in place of `sparsity`; without it, w is the width whose density is nearest to the one asked. Nothing needs repair:
    w = 1 already meets every row and, as the diagonal advances by d_k′/d_k ≤ 1 columns a row, every column.
    Returns the support, bool [d_k, d_k′], and 0. Raises ValueError for a width outside 1 … 2 d_k′ (2 d_k′ is dense).
    """
    if bandwidth is None:
        target = (1 - sparsity) * d_k * d_proj
        bandwidth = min(range(1, 2 * d_proj + 1), key=lambda width: abs(int(_band(d_k, d_proj, width).sum()) - target))
    elif type(bandwidth) is not int or not 1 <= bandwidth <= 2 * d_proj:
        raise ValueError(f"bandwidth must be an integer from 1 to 2 d_proj = {2 * d_proj} (columns), not {bandwidth!r}")
    return _band(d_k, d_proj, bandwidth), 0


def _band(d_k: int, d_proj: int, width: int) -> Tensor:
    row = torch.arange(d_k, device="cpu")[:, None]
    column = torch.arange(d_proj, device="cpu")[None, :]
    offset = 2 * d_k * column - ((2 * row + 1) * d_proj - d_k)  # 2 d_k (j - c_i), an integer
    return (offset >= -width * d_k) & (offset < width * d_k)
