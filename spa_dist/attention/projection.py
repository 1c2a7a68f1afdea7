"""The projections S of the paper: one registry of fixed patterns, drawn as a pure function of their arguments.

Every pattern satisfies E[S Sᵀ] = I over the seed, which is what makes ⟨q S, k S⟩ an unbiased estimate of ⟨q, k⟩. Random,
block, banded, hierarchical and head-specific are random signs of size 1/√nnz(row) on a support (proof: `signed`); conv
shares its weights and has its own proof (`conv_projection`); gaussian holds i.i.d. N(0, 1/d_k′). All but gaussian have
rows of norm exactly 1. The paper's claim of Theorem 1 for block and banded patterns does not follow from this: their
entries are not i.i.d., so how closely S Sᵀ concentrates about I depends on the input.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from spa_dist.attention.names import nearest
from spa_dist.attention.patterns.banded import banded_support
from spa_dist.attention.patterns.blocks import block_support, random_support
from spa_dist.attention.patterns.conv import conv_projection
from spa_dist.attention.patterns.hierarchical import hierarchical_support
from spa_dist.attention.patterns.signs import signed

Draw = Callable[..., tuple[Tensor, int]]


@dataclass(frozen=True)
class _Pattern:
    """draw(d_k, d_proj, sparsity, generator, **options) -> (S, non-zeros moved by the repair)."""

    draw: Draw
    description: str
    options: tuple[str, ...] = ()
    per_head: bool = False


def _on(support: Draw) -> Draw:
    def draw(d_k: int, d_proj: int, sparsity: float, generator: Generator, **options) -> tuple[Tensor, int]:
        mask, moved = support(d_k, d_proj, sparsity, generator, **options)
        return signed(mask, generator), moved

    return draw


def _gaussian(d_k: int, d_proj: int, sparsity: float, generator: Generator) -> tuple[Tensor, int]:
    # Drawn in float64: torch's float32 normals take a vectorised path whose last bits depend on the CPU.
    return torch.randn(d_k, d_proj, generator=generator, dtype=torch.float64, device="cpu") / d_proj**0.5, 0


_REGISTRY: dict[str, _Pattern] = {
    "random": _Pattern(_on(random_support), "random signs at uniformly random places (Definition 1)"),
    "block": _Pattern(_on(block_support), "random signs in a random choice of blocks", ("block",)),
    "banded": _Pattern(_on(banded_support), "random signs in a band about the diagonal", ("bandwidth",)),
    "hierarchical": _Pattern(_on(hierarchical_support), "groups of columns pooling runs of 2^l neighbours", ("levels",)),
    "conv": _Pattern(conv_projection, "one random kernel slid along the features", ("kernel_size",)),
    "head_specific": _Pattern(_on(random_support), "an independent random pattern for each head", per_head=True),
    "gaussian": _Pattern(_gaussian, "i.i.d. N(0, 1/d_k′) (Theorem 1): the dense reference, whatever the sparsity"),
}

PATTERNS: dict[str, str] = {name: pattern.description for name, pattern in _REGISTRY.items()}


def make_projection(
    pattern: str, d_k: int, d_proj: int, *, num_heads: int = 1, sparsity: float = 0.8, seed: int = 0, **options
) -> Tensor:
    """Draw S [num_heads, d_k, d_k′], float32 on CPU, an independent draw for each head, with E[S Sᵀ] = I (Definition 1).

    pattern: a name in `PATTERNS`. sparsity: the share of zeros asked for, in [0, 1); no row or column is ever left empty,
    so the actual share can be smaller (`projection_report` tells). options of the pattern, None meaning the default:
    block=(rows, columns), default (8, 8); bandwidth, in columns; levels, the number of groups; kernel_size, in features.
    bandwidth and kernel_size set the density in place of sparsity, and a gaussian S has no zeros.

    Head h depends on (arguments, seed, h) only: the same on every machine, whatever num_heads is. The tensor's attribute
    `repaired` is the number of non-zeros moved to fill empty rows and columns. Raises ValueError, in one line, for any
    argument that does not fit.
    """
    chosen = _lookup(pattern)
    for name, size in {"d_k": d_k, "d_proj": d_proj, "num_heads": num_heads}.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} must be a positive integer, not {size!r}")
    if d_proj > d_k:
        raise ValueError(f"d_proj = {d_proj} exceeds d_k = {d_k}: S projects to at most the width of a head")
    if not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), the share of zeros in S, not {sparsity!r}")
    if type(seed) is not int:
        raise ValueError(f"seed must be an integer, not {seed!r}")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in chosen.options:
            raise ValueError(f"pattern {pattern!r} has no option {name!r}{nearest(name, chosen.options)}")

    draws = [chosen.draw(d_k, d_proj, sparsity, _generator(seed, head), **given) for head in range(num_heads)]
    projection = torch.stack([values for values, _ in draws]).to(torch.float32)
    projection.repaired = sum(moved for _, moved in draws)  # type: ignore[attr-defined]
    return projection


def num_projections(pattern: str, per: str, num_kv_heads: int) -> int:
    """How many projections a layer holds: one for all its heads (per="layer"), or one per key/value head (per="head").

    A head-specific pattern is per head whatever `per` says. Raises ValueError for an unknown pattern or `per`.
    """
    if per not in ("layer", "head"):
        raise ValueError(f"per must be 'layer' or 'head', not {per!r}{nearest(per, ('layer', 'head'))}")
    return num_kv_heads if per == "head" or _lookup(pattern).per_head else 1


def _lookup(pattern: str) -> _Pattern:
    if pattern not in _REGISTRY:
        raise ValueError(f"unknown pattern {pattern!r}{nearest(pattern, _REGISTRY)}")
    return _REGISTRY[pattern]


def _generator(seed: int, head: int) -> Generator:
    """A stream of its own for each (seed, head); hashed, so that neighbouring seeds do not give related streams."""
    digest = hashlib.sha256(f"spa_dist projection {seed} {head}".encode()).digest()
    return Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
