"""Cross-entropy's two passes over the logits, each as one Triton kernel: what `cross_entropy.py` does in chunks elsewhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spa_dist.kernels.triton_interpreter import repair_bfloat16

repair_bfloat16()

BLOCK = 1024
"""Columns that a program holds at a time."""


def row_statistics(
    logits: Tensor, targets: Tensor, first: int, columns: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, Σ exp(logit - maximum), the target's logit or 0) of each row's first `columns`, float32 [rows]; logits are read once."""
    top, total, picked = (torch.empty(len(targets), dtype=torch.float32, device=logits.device) for _ in range(3))
    statistics_kernel[(len(targets),)](
        logits, targets, top, total, picked, logits.shape[1], columns, first, ignore_index, BLOCK, num_warps=8
    )
    return top, total, picked


def write_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, d_loss: Tensor, first: int, columns: int, ignore_index: int
) -> None:
    """Write d_loss (softmax - one-hot) over the logits; 0 in rows that are ignored and past `columns`."""
    gradient_kernel[len(targets), triton.cdiv(logits.shape[1], BLOCK)](
        logits, targets, lse, d_loss, logits.shape[1], columns, first, ignore_index, BLOCK
    )
    torch.autograd.graph.increment_version(logits)


@triton.jit
def statistics_kernel(
    Logits, Targets, Top, Sum, Picked, stride, columns, first, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: each lane has a running maximum and sum of its own, joined at the end."""
    row = tl.cast(tl.program_id(0), tl.int64)
    base = Logits + row * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    highest = tl.max(top, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(Top + row, highest)
    tl.store(Sum + row, tl.sum(total * tl.exp(top - shift), 0))
    target = tl.load(Targets + row)
    column = target - first
    here = (target != ignore_index) & (column >= 0) & (column < columns)
    tl.store(Picked + row, tl.load(base + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(
    Logits, Targets, Lse, D_loss, stride, columns, first, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(Targets + row)
    factor = tl.where(target != ignore_index, tl.load(D_loss).to(tl.float32), 0.0)
    x = tl.load(Logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    hit = (column == target - first) & (column < columns)
    gradient = factor * (tl.exp(x - tl.load(Lse + row)) - tl.where(hit, 1.0, 0.0))
    gradient = tl.where(column < columns, gradient, 0.0)
    tl.store(Logits + row * stride + column, gradient.to(Logits.dtype.element_ty), mask=column < stride)
