"""The elementwise functions of `pointwise.py` as one Triton kernel a pass; sums over rows in float32, in a fixed order."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from spa_dist.kernels.triton_attention import dropout_arguments
from spa_dist.kernels.triton_interpreter import repair_bfloat16
from spa_dist.kernels.triton_parts import keep

repair_bfloat16()

ROWS, COLUMNS = 8, 256
"""Of a tile."""
MAX_PARTS = 256
"""Partial sums of a column; each part is one program's run of rows."""
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_NORMAL_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))


def triton_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """`pointwise.bias_gelu` for contiguous x."""
    return _BiasGelu.apply(x, bias)


def triton_bias_dropout_residual(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, seed: int) -> Tensor:
    """`pointwise.bias_dropout_residual` for contiguous x and residual. The mask: Philox 4x32-10 of the element's index, key `seed`."""
    return _BiasDropoutResidual.apply(x, bias, residual, dropout, seed)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        total, out = x.detach(), torch.empty_like(x)
        rows, width = _shape(x)
        bias_gelu_forward[_tiles(rows, width)](total, bias, out, rows, width, ROWS, COLUMNS)
        torch.autograd.graph.increment_version(total)
        ctx.save_for_backward(total, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        total, bias = ctx.saved_tensors
        d_x, d_out = torch.empty_like(total), d_out.contiguous()
        rows, width = _shape(total)
        steps, sums = _parts(rows, width, total.device)
        bias_gelu_backward[len(sums), triton.cdiv(width, COLUMNS)](
            total, d_out, d_x, sums, rows, width, steps, ROWS, COLUMNS
        )
        return d_x, sums.sum(0).to(bias.dtype)


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, seed: int) -> Tensor:
        out = x.detach()
        rows, width = _shape(x)
        bias_dropout_residual_forward[_tiles(rows, width)](
            out,
            bias,
            residual,
            rows,
            width,
            *dropout_arguments(dropout, seed),
            bias is not None,
            dropout > 0.0,
            ROWS,
            COLUMNS,
        )
        torch.autograd.graph.increment_version(out)
        ctx.save_for_backward(bias)
        ctx.dropout, ctx.seed = dropout, seed
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (bias,) = ctx.saved_tensors
        if bias is None and ctx.dropout == 0.0:
            return d_out, None, d_out, None, None
        d_out = d_out.contiguous()
        d_x = torch.empty_like(d_out) if ctx.dropout > 0.0 else d_out
        rows, width = _shape(d_out)
        steps, sums = _parts(rows, width, d_out.device)
        bias_dropout_residual_backward[len(sums), triton.cdiv(width, COLUMNS)](
            d_out, d_x, sums, rows, width, steps, *dropout_arguments(ctx.dropout, ctx.seed), ctx.dropout > 0.0, ROWS, COLUMNS
        )
        return d_x, None if bias is None else sums.sum(0).to(bias.dtype), d_out, None, None


def _shape(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _tiles(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS)


def _parts(rows: int, width: int, device: torch.device) -> tuple[int, Tensor]:
    """(tiles of rows that a program takes in turn; room for the parts' sums, float32 [parts, width])."""
    tiles = triton.cdiv(rows, ROWS)
    steps = triton.cdiv(tiles, MAX_PARTS)
    return steps, torch.empty(triton.cdiv(tiles, steps), width, dtype=torch.float32, device=device)


@triton.jit
def tile(first_row, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(columns, which of the tile's elements exist, their places) of rows from `first_row` and this program's columns."""
    row = tl.cast(first_row, tl.int64) + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return column, inside, row[:, None] * width + column[None, :]


@triton.jit
def keep_place(seed_low, seed_high, threshold, place):
    """Which elements dropout keeps, by the Philox counter (low word of the place, its high word, 0, 0)."""
    return keep(seed_low, seed_high, threshold, 0, place >> 32, place & 0xFFFFFFFF)


@triton.jit
def bias_gelu_forward(X, Bias, Out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """X += Bias; Out = gelu(X)."""
    column, inside, place = tile(tl.program_id(0) * ROWS, rows, width, ROWS, COLUMNS)
    bias = tl.load(Bias + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.load(X + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    rounded = total.to(X.dtype.element_ty)
    tl.store(X + place, rounded, mask=inside)
    total = rounded.to(tl.float32)
    out = total * 0.5 * (1.0 + tl.erf(total * _ROOT_HALF))
    tl.store(Out + place, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward(Total, D_out, D_x, Sums, rows, width, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """D_x = D_out gelu'(Total), and its sums over this program's rows."""
    part = tl.program_id(0)
    sums = tl.zeros([COLUMNS], tl.float32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for step in range(steps):
        _, inside, place = tile((part * steps + step) * ROWS, rows, width, ROWS, COLUMNS)
        total = tl.load(Total + place, mask=inside, other=0.0).to(tl.float32)
        slope = 0.5 * (1.0 + tl.erf(total * _ROOT_HALF)) + total * tl.exp(-0.5 * total * total) * _NORMAL_AT_0
        d_x = tl.load(D_out + place, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(D_x + place, d_x.to(D_x.dtype.element_ty), mask=inside)
        sums += tl.sum(d_x, 0)
    tl.store(Sums + part * width + column, sums, mask=column < width)


@triton.jit
def bias_dropout_residual_forward(
    X, Bias, Residual, rows, width, seed_low, seed_high, threshold, keep_scale,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """X = Residual + dropout(X + Bias)."""
    column, inside, place = tile(tl.program_id(0) * ROWS, rows, width, ROWS, COLUMNS)
    out = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(Bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        out = tl.where(keep_place(seed_low, seed_high, threshold, place), out * keep_scale, 0.0)
    out += tl.load(Residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(X + place, out.to(X.dtype.element_ty), mask=inside)


@triton.jit
def bias_dropout_residual_backward(
    D_out, D_x, Sums, rows, width, steps, seed_low, seed_high, threshold, keep_scale,
    DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """D_x = dropout(D_out), and its sums over this program's rows."""
    part = tl.program_id(0)
    sums = tl.zeros([COLUMNS], tl.float32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for step in range(steps):
        _, inside, place = tile((part * steps + step) * ROWS, rows, width, ROWS, COLUMNS)
        d_x = tl.load(D_out + place, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            d_x = tl.where(keep_place(seed_low, seed_high, threshold, place), d_x * keep_scale, 0.0)
            tl.store(D_x + place, d_x.to(D_x.dtype.element_ty), mask=inside)
        sums += tl.sum(d_x, 0)
    tl.store(Sums + part * width + column, sums, mask=column < width)
