"""Random and block supports: a random choice of cells of a grid over S. A random pattern is the grid of 1 × 1 cells."""

import torch
from torch import Generator, Tensor

from spa_dist.attention.patterns.coverage import cover


def block_support(
    d_k: int, d_proj: int, sparsity: float, generator: Generator, *, block: tuple[int, int] = (8, 8)
) -> tuple[Tensor, int]:
    """A random set of blocks that covers every row and column, as near to the asked density as whole blocks allow.

    block (rows, columns), any shape: where it does not divide S, the blocks at the far edges are cut off there.
    Returns the support, bool [d_k, d_k′], and the number of blocks' non-zeros that the repair moved. When the asked
    density is below that of the fewest blocks that cover S, these are taken and the density is higher than asked.
    """
    rows, columns = _checked(block)
    heights = _edges(d_k, rows)
    widths = _edges(d_proj, columns)
    area = heights[:, None] * widths[None, :]
    target = (1 - sparsity) * d_k * d_proj
    priority = torch.rand(area.shape, generator=generator, dtype=torch.float64, device="cpu")

    count = max(round((1 - sparsity) * area.numel()), *area.shape)
    chosen = torch.zeros(area.numel(), dtype=torch.bool, device="cpu")
    chosen[priority.flatten().argsort(descending=True)[:count]] = True
    drawn = chosen.view(area.shape)
    covered, _ = cover(drawn, priority)
    moved = int(area[covered & ~drawn].sum())
    if rows * columns > 1:
        covered = _approach(covered, priority, area, target)
    support = covered.repeat_interleave(heights, dim=0).repeat_interleave(widths, dim=1)
    return support, moved


def random_support(d_k: int, d_proj: int, sparsity: float, generator: Generator) -> tuple[Tensor, int]:
    """round((1 - sparsity) d_k d_k′) non-zeros, or max(d_k, d_k′) if that is more, uniformly placed, then repaired.

    The support of Definition 1 with its expected number of non-zeros as the exact one. Returns as `block_support`.
    """
    return block_support(d_k, d_proj, sparsity, generator, block=(1, 1))


def _approach(chosen: Tensor, priority: Tensor, area: Tensor, target: float) -> Tensor:
    """Add or drop blocks, in order of priority, while that brings the covered area nearer to `target`.

    Cut-off blocks at the edges make areas unequal, so the right number of blocks need not be the right area. A block is
    dropped only where its row and its column of blocks hold another.
    """
    chosen = chosen.clone()
    while True:
        excess = float(area[chosen].sum()) - target
        helps = area < 2 * abs(excess)
        if excess < 0:
            candidates = ~chosen & helps
        else:
            shared = (chosen.sum(dim=1, keepdim=True) > 1) & (chosen.sum(dim=0, keepdim=True) > 1)
            candidates = chosen & shared & helps
        if not candidates.any():
            return chosen
        rank = priority if excess < 0 else -priority
        flipped = rank.masked_fill(~candidates, -float("inf")).argmax()
        chosen.view(-1)[flipped] ^= True


def _edges(size: int, step: int) -> Tensor:
    """The lengths of the pieces of `size` cut every `step`."""
    starts = torch.arange(0, size, step, device="cpu")
    return (size - starts).clamp(max=step)


def _checked(block: tuple[int, int]) -> tuple[int, int]:
    valid = isinstance(block, (tuple, list)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not valid:
        raise ValueError(f"block must be two positive integers (rows, columns), not {block!r}")
    return block[0], block[1]
