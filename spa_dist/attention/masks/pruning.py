"""Magnitude pruning and regrowth by gradient, exact to the entry, for each head of S by itself."""

import math

import torch
from torch import Tensor


def number_kept(sparsity: float, entries: int) -> int:
    """Entries that stay of `entries` at a sparsity in [0, 1): the nearest integer, at least 1."""
    return max(1, math.floor((1.0 - sparsity) * entries + 0.5))


def largest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest values among the candidates, or of all candidates where there are fewer.

    values and candidates (bool) of one shape. Ties go to the lower index, so the answer is the same on every machine.
    """
    count = min(count, int(candidates.sum()))
    scores = torch.where(candidates, values, torch.full_like(values, -torch.inf)).flatten()
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[order] = True
    return chosen.view(values.shape)


def pruned(weight: Tensor, mask: Tensor, gradient: Tensor | None, *, kept: int, regrown: int) -> tuple[Tensor, Tensor]:
    """One update of a mask: keep the largest weights, then grow where the gradient is largest.

    weight W, mask (bool), gradient ∇_S (all entries, the masked ones too) [heads, d_k, d_k′]; None: nothing grows.
    kept: entries of each head after the update; regrown: how many of them are chosen by |∇_S| among all that pruning left
    out, those it has just pruned included (Algorithm 2, lines 7 and 8; RigL). A head with fewer entries than it should have
    grows the difference too.

    Returns (new mask, survivors): survivors are the entries whose weights stay; grown ones start at zero.
    """
    new, survivors = torch.empty_like(mask), torch.empty_like(mask)
    for head in range(len(mask)):
        regrow = regrown if gradient is not None else 0
        survivors[head] = largest(weight[head].abs(), mask[head], kept - regrow)
        new[head] = survivors[head]
        if gradient is not None:
            room = kept - int(survivors[head].sum())
            new[head] |= largest(gradient[head].abs(), ~survivors[head], room)
    return new, survivors
