"""The kinds of attention that are compared, and the controls that say what a difference between them is due to.

The controls: `thin` has the function class of every full-rank S at the same cost; a gate on dense, thin and random attention says how
much of the adaptive pattern's gain is its gate, and at which scale; `lr ×1` is the paper's training, in which W_Q and W_K learn at the
model's rate and W_Q·S therefore faster than thin's W_Q; the dense variants bound what the width can give.
"""

from dataclasses import dataclass
from typing import Any

SPARSITY = 0.8
LR_SCALE = 30.0
"""Learning rate of mask logits over the model's. At 1 no gate crosses its threshold in a few hundred steps of Adam."""
PAPER_LAMBDA = 1e-5
CONTROL = "thin"
"""What the others are compared with, at the same d_k′ and seed."""


@dataclass(frozen=True)
class Variant:
    """One row of a table: what stands in the config's section `attention`, without d_k′."""

    name: str
    kind: str = "spa"
    pattern: str = "random"
    scale: str = "paper"
    lr_scale: str | float = "matched"
    """Learning rate of W_Q and W_K with SPA: at the model's own it moves W_Q·S d_k/d_k′ times as far as thin's W_Q."""
    gate: bool = False
    method: str | None = None
    """Of a learned mask."""
    l0_lambda: float | None = None
    """λ of this variant; None: the task's own, with which the density ends near 1 − SPARSITY."""
    ablation: bool = False
    """Shows what one choice of the others is worth: run after all of them."""

    @property
    def has_width(self) -> bool:
        """Whether d_k′ means anything to it."""
        return self.kind != "dense"

    def attention(self, d_proj: int, settings: dict[str, Any]) -> dict[str, Any]:
        """The config's section `attention` at this d_k′.

        settings: the task's `every` (steps between mask updates) and `l0_lambda`.
        """
        section: dict[str, Any] = {"kind": self.kind, "d_proj": d_proj, "gate": self.gate}
        if self.kind == "spa":
            section |= {"pattern": self.pattern, "scale": self.scale, "sparsity": SPARSITY, "lr_scale": self.lr_scale}
        if self.pattern == "block":
            section["block"] = list(block_size(d_proj))
        if self.method is not None:
            section["mask"] = self._mask(settings)
        return section

    def _mask(self, settings: dict[str, Any]) -> dict[str, Any]:
        mask: dict[str, Any] = {"method": self.method, "every": settings["every"]}
        if self.method == "magnitude":
            mask["magnitude"] = {}
        elif self.method != "none":
            own = settings["l0_lambda"][self.method]
            mask |= {"l0_lambda": own if self.l0_lambda is None else self.l0_lambda, "lr_scale": LR_SCALE}
            mask[str(self.method)] = {}
        return mask


def block_size(d_proj: int) -> tuple[int, int]:
    """Eight rows, and eight blocks beside each other, so that there is a choice of blocks at 80 % sparsity; 8 × 8 leaves none."""
    return 8, max(1, d_proj // 8)


def _both_scales(name: str, **fields: Any) -> list[Variant]:
    return [Variant(f"{name}, {scale}", scale=scale, **fields) for scale in ("paper", "unbiased")]


def _learned(name: str, pattern: str, methods: tuple[str, ...]) -> list[Variant]:
    gate = pattern == "adaptive"
    return [
        variant
        for method in methods
        for variant in _both_scales(f"{name} {method}", pattern=pattern, method=method, gate=gate)
    ]


VARIANTS: tuple[Variant, ...] = (
    Variant("dense", kind="dense"),
    Variant("thin", kind="thin"),
    *_both_scales("random"),
    *_both_scales("block", pattern="block"),
    *_both_scales("banded", pattern="banded"),
    *_learned("learned", "learned", ("magnitude", "gumbel", "l0", "none")),
    *_learned("adaptive", "adaptive", ("magnitude", "gumbel")),
    Variant("dense + gate", kind="dense", gate=True),
    Variant("thin + gate", kind="thin", gate=True),
    *_both_scales("random + gate", gate=True),
    *_both_scales("random, lr ×1", lr_scale=1.0, ablation=True),
    *_both_scales("random + gate, lr ×1", gate=True, lr_scale=1.0, ablation=True),
    *(
        Variant(f"learned {method}, paper, λ=1e-5", pattern="learned", method=method, l0_lambda=PAPER_LAMBDA, ablation=True)
        for method in ("gumbel", "l0")
    ),
)


def variants_named(part: str | None) -> list[Variant]:
    """The variants whose name contains `part`; all of them without one."""
    return [variant for variant in VARIANTS if part is None or part in variant.name]
