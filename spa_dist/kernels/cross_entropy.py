"""Cross-entropy over classes that may be split between ranks, which holds the logits once, in the forward and in the backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spa_dist.kernels.triton_backend import serves_elementwise

CHUNK_BYTES = 8 << 20
"""Bytes of float32 logits that are worked on at a time."""
AllReduce = Callable[[Tensor, str], object]


class _Classes(NamedTuple):
    """What the columns of the logits are: classes [first, first + columns) of all; the columns after those are padding."""

    first: int
    columns: int
    ignore_index: int


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    first_class: int = 0,
    num_classes: int | None = None,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Sum over the rows of -log softmax(logits)[target]: a scalar, float32 at least.

    logits [rows, columns] of any float dtype, contiguous: columns are the classes from `first_class` on, and those at or past
    `num_classes` (default: all are classes) take no part. targets int64 [rows] are global classes; rows whose target is
    `ignore_index` count nothing. all_reduce(tensor, "max" or "sum") joins in place the ranks that hold the other classes.

    Keeps the logits it was given and a log-sum-exp per row. The backward writes the gradient over the logits, so it runs once,
    and nobody else may need them: torch's and megatron-core's keep a float32 tensor of their size instead.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or not logits.is_contiguous():
        raise ValueError(
            f"cross_entropy: logits must be contiguous [rows, columns] and targets [rows], got {tuple(logits.shape)} "
            f"and {tuple(targets.shape)}"
        )
    columns = logits.shape[1]
    count = columns if num_classes is None else max(0, min(columns, num_classes - first_class))
    return _CrossEntropy.apply(logits, targets, _Classes(first_class, count, ignore_index), all_reduce)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, classes: _Classes, all_reduce: AllReduce | None) -> Tensor:
        top, total, picked = _row_statistics(logits, targets, classes)
        if all_reduce is not None:
            own = top.clone()
            all_reduce(top, "max")
            all_reduce(total.mul_(own.sub_(top).exp_()), "sum")
            all_reduce(picked, "sum")
        lse = total.log_().add_(top)
        ctx.save_for_backward(logits, targets, lse)
        ctx.classes = classes
        return ((lse - picked) * (targets != classes.ignore_index)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        _write_gradient(logits, targets, lse, d_loss, ctx.classes)
        return logits, None, None, None


def _row_statistics(logits: Tensor, targets: Tensor, classes: _Classes) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, Σ exp(logit - maximum), the target's logit or 0) of each row over the classes held here: [rows], float32 at least."""
    if serves_elementwise(logits):
        from spa_dist.kernels.triton_cross_entropy import row_statistics

        return row_statistics(logits, targets, classes.first, classes.columns, classes.ignore_index)
    top, total, picked = (torch.empty(len(targets), dtype=_wide(logits), device=logits.device) for _ in range(3))
    for rows in _chunks(logits):
        part = logits[rows, : classes.columns]
        top[rows] = part.amax(-1) if classes.columns else -torch.inf
        total[rows] = (part.to(top.dtype) - top[rows, None]).exp_().sum(-1)
        picked[rows] = _picked(part, targets[rows], classes)
    return top, total, picked


def _write_gradient(logits: Tensor, targets: Tensor, lse: Tensor, d_loss: Tensor, classes: _Classes) -> None:
    """Write d_loss (softmax - one-hot) over the logits; 0 in rows that are ignored and in columns of padding."""
    if serves_elementwise(logits):
        from spa_dist.kernels.triton_cross_entropy import write_gradient

        write_gradient(logits, targets, lse, d_loss, classes.first, classes.columns, classes.ignore_index)
        return
    for rows in _chunks(logits):
        factor = ((targets[rows] != classes.ignore_index) * d_loss)[:, None]
        gradient = (logits[rows, : classes.columns].to(lse.dtype) - lse[rows, None]).exp_().mul_(factor)
        column, here = _columns(targets[rows], classes)
        if classes.columns:
            gradient.scatter_add_(-1, column[:, None], -(factor * here[:, None]).to(gradient.dtype))
        logits[rows, : classes.columns] = gradient
    logits[:, classes.columns :] = 0.0


def _columns(targets: Tensor, classes: _Classes) -> tuple[Tensor, Tensor]:
    """(column of each target, 0 where it is not among these classes; whether it is)."""
    here = (targets >= classes.first) & (targets < classes.first + classes.columns) & (targets != classes.ignore_index)
    return (targets - classes.first).masked_fill(~here, 0), here


def _picked(part: Tensor, targets: Tensor, classes: _Classes) -> Tensor:
    if not classes.columns:
        return part.new_zeros(len(targets))
    column, here = _columns(targets, classes)
    return part.gather(-1, column[:, None])[:, 0].masked_fill(~here, 0.0)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, CHUNK_BYTES // (4 * max(1, logits.shape[1])))
    return [slice(i, min(i + step, len(logits))) for i in range(0, len(logits), step)]
