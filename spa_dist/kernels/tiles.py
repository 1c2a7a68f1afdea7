"""How the tiled backend cuts an attention problem, and the dropout mask of each tile.

A tile is some of the batch (folded batch and key/value heads) times a run of query rows, against *all* the keys that those
rows can see. Whole rows mean one softmax per tile and no running maximum; memory is a tile: O(keys), not O(queries * keys).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem

TILE_ELEMENTS = 1 << 20
"""Scores that a tile aims to hold: 4 MiB in float32, which the shared cache of the CPUs tried here keeps."""
MIN_ROWS, MAX_ROWS = 64, 128
"""Query rows of a tile: fewer starve the matrix product, more compute masked scores along the causal diagonal."""
_KEEP_LEVELS = 1 << 16


@dataclass(frozen=True)
class Tile:
    """Folded batch entries [z0, z1) and query rows [i0, i1) against keys [0, keys)."""

    z0: int
    z1: int
    i0: int
    i1: int
    keys: int


def tile_rows(p: Problem) -> int:
    """Query rows per tile (of each of the query heads that share a key/value head)."""
    rows = TILE_ELEMENTS // (p.keys * p.group)
    if p.causal:
        rows = min(rows, max(MIN_ROWS, p.queries // 8))
    rows = max(MIN_ROWS // p.group, min(rows, MAX_ROWS), 1)
    return min(-(-rows // 16) * 16, p.queries)


def tiles(p: Problem) -> Iterator[Tile]:
    """The tiles in order; rows that a causal mask leaves without any key are in none of them."""
    rows = tile_rows(p)
    folded = p.batch * p.kv_heads
    step = max(1, min(folded, TILE_ELEMENTS // (rows * p.group * p.keys)))
    first = max(0, -p.causal_shift) if p.causal else 0
    for z0 in range(0, folded, step):
        for i0 in range(first, p.queries, rows):
            i1 = min(i0 + rows, p.queries)
            keys = min(p.keys, i1 + p.causal_shift) if p.causal else p.keys
            yield Tile(z0, min(z0 + step, folded), i0, i1, keys)


def drop_threshold(dropout: float) -> int:
    """Dropout in units of 2^-16, the mask's resolution."""
    return min(_KEEP_LEVELS - 1, round(dropout * _KEEP_LEVELS))


def keep_scale(dropout: float) -> float:
    """What kept probabilities are multiplied by: 1 / (the fraction that the mask keeps)."""
    return _KEEP_LEVELS / (_KEEP_LEVELS - drop_threshold(dropout))


def keep_mask(p: Problem, tile: Tile) -> Tensor:
    """The dropout mask of one tile, True where kept: bool [z, r, rows, keys], a function of seed, shape and tile alone."""
    shape = (tile.z1 - tile.z0, p.group, tile.i1 - tile.i0, tile.keys)
    seed = mix_seeds(mix_seeds(p.seed, tile.z0), tile.i0)
    levels = seeded_levels(shape[0] * shape[1] * shape[2] * shape[3], seed, p.device).view(shape)
    return levels >= drop_threshold(p.dropout) - (1 << 15)


def seeded_levels(count: int, seed: int, device: torch.device) -> Tensor:
    """`count` independent 16-bit integers, uniform over their range, from a generator of their own: int16 [count]."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed & ((1 << 63) - 1))
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(torch.int16)[:count]


@lru_cache(maxsize=8)
def hidden_corner(rows: int, columns: int, device: torch.device) -> Tensor:
    """Where a causal tile's last columns are hidden: bool [rows, columns], True for column > row."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu_(1)


def mix_seeds(a: int, b: int) -> int:
    """SplitMix64 of a and b, within the 63 bits that a generator takes as its seed."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
