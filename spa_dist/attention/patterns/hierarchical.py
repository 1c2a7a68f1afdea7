"""Hierarchical support: groups of columns at several resolutions, each pooling runs of 2^l neighbouring features."""

import torch
from torch import Generator, Tensor


def hierarchical_support(
    d_k: int, d_proj: int, sparsity: float, generator: Generator, *, levels: int | None = None
) -> tuple[Tensor, int]:
    """`levels` groups of columns; those of group l hold runs of 2^l features, l = a, a+1, …, a + levels - 1.

    The runs of a group are spaced evenly from the first feature to the last (a run is cut to d_k where 2^l exceeds it).
    The finest resolution a and the sizes of the groups, equal at first, are chosen for the density nearest to the one
    asked, with one column at least in each group and enough in the coarsest for its runs to cover every feature. So
    nothing needs repair. levels: 3 unless given, or as many as fit. Returns the support, bool [d_k, d_k′], and 0.
    Raises ValueError for more levels than fit: each needs a column and a run no longer than the next power of 2 ≥ d_k.
    """
    finest_to_whole = [min(2**level, d_k) for level in range((d_k - 1).bit_length() + 1)]
    most = min(d_proj, len(finest_to_whole))
    if levels is None:
        levels = min(3, most)
    elif type(levels) is not int or not 1 <= levels <= most:
        raise ValueError(f"levels must be an integer from 1 to {most} for d_k = {d_k} and d_proj = {d_proj}, not {levels!r}")
    runs, sizes = _resolutions(finest_to_whole, levels, d_k, d_proj, (1 - sparsity) * d_k * d_proj)
    groups = [_runs(d_k, run, size) for run, size in zip(runs, sizes)]
    return torch.cat(groups, dim=1), 0


def _resolutions(lengths: list[int], levels: int, d_k: int, d_proj: int, target: float) -> tuple[list[int], list[int]]:
    """The run lengths (consecutive in `lengths`) and group sizes whose number of non-zeros is nearest to `target`."""

    def miss(choice: tuple[list[int], list[int]]) -> float:
        return abs(sum(run * size for run, size in zip(*choice)) - target)

    choices = []
    for first in range(len(lengths) - levels + 1):
        runs = lengths[first : first + levels]
        covering = -(-d_k // runs[-1])
        if covering <= d_proj - (levels - 1):
            choices.append((runs, _even_sizes(d_proj, levels, covering)))
    runs, sizes = min(choices, key=miss)
    covering = -(-d_k // runs[-1])
    while True:
        moves = [
            (runs, [size + (g == taker) - (g == giver) for g, size in enumerate(sizes)])
            for giver in range(levels)
            for taker in range(levels)
            if giver != taker and sizes[giver] > (covering if giver == levels - 1 else 1)
        ]
        best = min(moves, key=miss, default=(runs, sizes))
        if miss(best) >= miss((runs, sizes)):
            return runs, sizes
        sizes = best[1]


def _even_sizes(total: int, groups: int, last: int) -> list[int]:
    """`total` columns in equal groups, the remainder to the finest; the last group gets at least `last`."""
    even = [total // groups + (g < total % groups) for g in range(groups)]
    if even[-1] >= last:
        return even
    return [*_even_sizes(total - last, groups - 1, 0), last]


def _runs(d_k: int, length: int, count: int) -> Tensor:
    """bool [d_k, count]: `count` runs of `length` features, the first at the top, the last at the bottom.

    With count · length ≥ d_k neighbouring starts are at most `length` apart, so together they cover every feature.
    """
    slack = d_k - length
    position = torch.arange(count, device="cpu")
    starts = position * slack // (count - 1) if count > 1 else torch.tensor([slack // 2], device="cpu")
    feature = torch.arange(d_k, device="cpu")[:, None]
    return (feature >= starts) & (feature < starts + length)
