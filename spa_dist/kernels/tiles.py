"""How the tiled backend cuts an attention problem, and the dropout mask of each tile.

A tile is some of the batch (folded batch and key/value heads) times a run of query rows, against *all* the keys that those
rows can see. Whole rows mean one softmax per tile and no running maximum; memory is a tile: O(keys), not O(queries * keys).
"""

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


def tiles(p: Problem) -> tuple[Tile, ...]:
    """The tiles in order; rows that a causal mask leaves without any key are in none of them."""
    sizes = (TILE_ELEMENTS, MIN_ROWS, MAX_ROWS)
    return _tiles(p.batch * p.kv_heads, p.group, p.queries, p.keys, p.causal, sizes)


@lru_cache(maxsize=64)
def _tiles(folded: int, group: int, queries: int, keys: int, causal: bool, sizes: tuple[int, int, int]) -> tuple[Tile, ...]:
    elements, rows_min, rows_max = sizes
    rows = elements // (keys * group)
    if causal:
        rows = min(rows, max(rows_min, queries // 8))
    rows = max(rows_min // group, min(rows, rows_max), 1)  # of each of the query heads that share a key/value head
    rows = min(-(-rows // 16) * 16, queries)
    step = max(1, min(folded, elements // (rows * group * keys)))
    shift = keys - queries if causal else 0
    return tuple(
        Tile(z0, min(z0 + step, folded), i0, i1, min(keys, i1 + shift) if causal else keys)
        for z0 in range(0, folded, step)
        for i0 in range(max(0, -shift), queries, rows)
        for i1 in [min(i0 + rows, queries)]
    )


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


def score_limits(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What a score may be at most, in hidden's shape: -inf where hidden is True, inf elsewhere."""
    limits = torch.full(hidden.shape, torch.inf, dtype=dtype, device=hidden.device)
    return limits.masked_fill_(hidden, -torch.inf)


@lru_cache(maxsize=8)
def corner_limits(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`score_limits` of a causal tile's last columns, [rows, columns]: those with column > row are hidden."""
    return score_limits(torch.ones(rows, columns, dtype=torch.bool, device=device).triu_(1), dtype)


def mix_seeds(a: int, b: int) -> int:
    """SplitMix64 of a and b, within the 63 bits that a generator takes as its seed."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
