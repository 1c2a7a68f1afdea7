"""Rotary positions (RoPE), applied after the projection, on d_k′.

RoPE makes ⟨R_m q, R_n k⟩ a function of m - n because R_m is a rotation of the space in which the product is taken. That
space is the projected one: S after RoPE would break the property (R_mᵀ S Sᵀ R_n is no function of m - n) and could not be
folded into the weights.
"""

import torch
from torch import Tensor


def rotary_tables(
    positions: int | Tensor,
    dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(-2i/dim), i = 0 … dim/2 - 1.

    positions: a length N (positions 0 … N-1) or a tensor [..., N] of positions, negative ones allowed. Returns two
    tensors [..., N, dim/2] in `dtype`; angles are computed in float64, so that far positions keep their precision
    (float32 on a device without it). Raises ValueError for an odd dim.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary positions need an even width, not {dim}")
    if isinstance(positions, Tensor):
        device = positions.device if device is None else device
    else:
        positions = torch.arange(positions, device=device)
    wide = torch.float32 if torch.device(positions.device).type == "mps" else torch.float64
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim
    angles = positions.to(wide)[..., None] * theta**-exponents
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+dim/2}) of each position by its angles (the half-split, "rotate_half" convention).

    x [..., N, dim], leading dimensions batch and heads; cos, sin [N, dim/2], or anything that broadcasts against
    [..., N, dim/2]. Computes in the wider of the dtypes; returns x's shape and dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
