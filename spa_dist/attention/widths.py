"""Which width queries and keys have for each `attention.kind`, and the factor that scales their logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from spa_dist.attention.names import nearest


@dataclass(frozen=True)
class Kind:
    """One entry of the attention registry: what it is, whether a projection S exists, and d_qk from (d_k, d_k′)."""

    description: str
    has_projection: bool
    query_key_width: Callable[[int, int], int]


KINDS: dict[str, Kind] = {
    "spa": Kind("queries and keys of width d_k, projected by a sparse S to d_k′", True, lambda d_k, d_proj: d_proj),
    "dense": Kind("standard attention, queries and keys of width d_k", False, lambda d_k, d_proj: d_k),
    "thin": Kind("the control: queries and keys born d_k′ wide, no S", False, lambda d_k, d_proj: d_proj),
}


def query_key_width(kind: str, d_k: int, d_proj: int) -> int:
    """The width d_qk at which attention of this kind compares queries with keys.

    Raises ValueError for a kind that is not in `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown attention kind {kind!r}{nearest(kind, KINDS)}")
    return KINDS[kind].query_key_width(d_k, d_proj)


def logit_scale(scale: str | float, d_k: int, d_proj: int) -> float:
    """The factor on ⟨q S, k S⟩ before the softmax.

    "paper" is 1/√d_k′ (Section 3.1.3). "unbiased" is 1/√d_k: with E[S Sᵀ] = I (Definition 1) the projected product
    estimates ⟨q, k⟩ itself, so this is the scale at which SPA estimates the logits of standard attention; the paper's
    inflates them by √(d_k/d_k′). A finite positive number is taken as it stands. Raises ValueError for anything else.
    """
    if scale == "paper":
        return 1.0 / math.sqrt(d_proj)
    if scale == "unbiased":
        return 1.0 / math.sqrt(d_k)
    if _is_positive(scale):
        return float(scale)
    raise ValueError(f"scale must be 'paper', 'unbiased' or a positive number, not {scale!r}")


def query_key_lr_scale(lr_scale: str | float, kind: str, d_k: int, d_proj: int) -> float:
    """The factor on the learning rate of W_Q and W_K.

    "matched" makes the folded weight W_Q·S of kind "spa" move as fast as the W_Q of kind "thin". A gradient step of size η on W_Q moves
    W_Q·S by -η G Sᵀ S, where G is the gradient of W_Q·S, and E[Sᵀ S] = (d_k/d_k′) I follows from E[S Sᵀ] = I for i.i.d. entries. Adam's
    step has entries of ±η; through a Gaussian S it has a root mean square of η √(2/π) d_k/d_k′ along G. Hence d_k′/d_k.
    A finite positive number is taken as it stands. Raises ValueError for anything else.
    """
    if lr_scale == "matched":
        return d_proj / d_k if kind == "spa" else 1.0
    if _is_positive(lr_scale):
        return float(lr_scale)
    raise ValueError(f"lr_scale must be 'matched' or a positive number, not {lr_scale!r}")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
