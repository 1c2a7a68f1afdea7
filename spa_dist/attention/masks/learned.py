"""S = M ⊙ W whose mask M is learned too (Section 3.2, Algorithm 2)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spa_dist.attention.masks.gates import (
    HardConcrete,
    binary_concrete_mask,
    binary_concrete_probability,
    binary_concrete_sample,
)
from spa_dist.attention.masks.noise import uniform_noise
from spa_dist.attention.masks.schedules import TemperatureSchedule
from spa_dist.attention.names import nearest

METHODS = {
    "gumbel": "binary gates sampled by the Gumbel trick, straight-through, at a falling temperature",
    "l0": "hard concrete gates under an L0 penalty",
    "magnitude": "the largest weights stay, on a schedule; optionally others regrow by gradient",
    "none": "a dense S, learned",
}
LEARNED_PATTERNS = ("learned", "adaptive")
"""Names of the pattern of an S whose mask is learned; adaptive has a gate for each head too."""
_GATED = ("gumbel", "l0")


@dataclass(frozen=True)
class MaskMethod:
    """How M is trained. The hard concrete constants are those of Louizos et al. (2018)."""

    name: str
    temperature: TemperatureSchedule = field(default_factory=TemperatureSchedule)
    """Of `gumbel` gates."""
    beta: float = 2 / 3
    gamma: float = -0.1
    zeta: float = 1.1
    initial_probability: float = 0.9
    """Of a gate on the support of the first S to be on; off the support it is 1 minus this."""

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"unknown mask method {self.name!r}{nearest(self.name, METHODS)}")
        if not 0.5 < self.initial_probability < 1:
            raise ValueError(f"initial_probability must lie in (0.5, 1), not {self.initial_probability!r}")
        if self.name == "gumbel" and min(self.temperature.initial, self.temperature.final) <= 0:
            raise ValueError("a gate's temperature must be above 0")

    @property
    def has_gates(self) -> bool:
        """Whether M comes from logits that an optimizer moves."""
        return self.name in _GATED

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What S is made of: the keys of `initial`."""
        mask = {"magnitude": ("mask",), "gumbel": ("mask_logits",), "l0": ("mask_logits",)}
        return ("weight", *mask.get(self.name, ()))

    @property
    def hard_concrete(self) -> HardConcrete:
        """The distribution of `l0` gates."""
        return HardConcrete(self.beta, self.gamma, self.zeta)

    def initial(self, projection: Tensor) -> dict[str, Tensor]:
        """Tensors of a `LearnedProjection` that starts at a drawn S [heads, d_k, d_k′], by their names in it."""
        tensors = {"weight": projection.clone()}
        support = projection != 0
        if self.name == "magnitude":
            tensors["mask"] = support.to(projection.dtype)
        elif self.has_gates:
            logit = torch.logit(torch.tensor(self.initial_probability, dtype=torch.float64))
            shift = self.hard_concrete.shift if self.name == "l0" else 0.0
            tensors["mask_logits"] = (torch.where(support, logit, -logit) + shift).to(projection.dtype)
        return tensors

    def probability(self, logits: Tensor) -> Tensor:
        """P(gate ≠ 0) of each logit."""
        return self.hard_concrete.probability(logits) if self.name == "l0" else binary_concrete_probability(logits)

    def final_mask(self, tensors: dict[str, Tensor]) -> Tensor:
        """The deterministic M of the tensors of `initial`, as evaluation and export use it."""
        if self.name == "magnitude":
            return tensors["mask"]
        if self.name == "l0":
            return self.hard_concrete.mask(tensors["mask_logits"])
        if self.name == "gumbel":
            return binary_concrete_mask(tensors["mask_logits"])
        return torch.ones_like(tensors["weight"])

    def final_projection(self, tensors: dict[str, Tensor]) -> Tensor:
        """S = M ⊙ W with the deterministic M, [heads, d_k, d_k′]."""
        return tensors["weight"] * self.final_mask(tensors)


class LearnedProjection(nn.Module):
    """The weights W of S, and what its mask is learned from. `forward()` gives S.

    State: `weight` [heads, d_k, d_k′]; for `magnitude` the buffer `mask` of 0 and 1; for `gumbel` and `l0` the parameter
    `mask_logits`. `step` is the optimizer step in progress, counted from 1: it says which noise and which temperature. In
    evaluation mode M is deterministic.

    heads and head_offset: which of `total_heads` this module holds, so that tensor-parallel parts draw their part of one noise.
    """

    mask: Tensor

    def __init__(
        self,
        method: MaskMethod,
        shape: tuple[int, int, int],
        *,
        seed: int,
        name: str,
        head_offset: int = 0,
        total_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.method, self.seed, self.name = method, seed, name
        self._head_offset, self._noise_shape = head_offset, (total_heads or shape[0], *shape[1:])
        self.step = 0
        self.weight = nn.Parameter(torch.empty(shape))
        if method.name == "magnitude":
            self.register_buffer("mask", torch.empty(shape))
        if method.has_gates:
            self.mask_logits = nn.Parameter(torch.empty(shape))
            self.mask_logits.no_weight_decay = True  # type: ignore[attr-defined]
        self.expected_nonzeros: Tensor | None = None
        """Σ P(gate ≠ 0) over this module's gates, in the graph of the last training forward; for the L0 penalty."""
        self.collects_gradient = False
        """Whether backward adds ∇_S, of all entries, to `dense_gradient`: what regrowth is decided by."""
        self.dense_gradient: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make S, by name."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def forward(self) -> Tensor:
        """S [heads, d_k, d_k′] of weight's dtype."""
        if self.method.has_gates and self.training:
            projection = self.weight * self._sampled_gates().to(self.weight.dtype)
        elif self.method.name == "magnitude":
            projection = self.weight * self.mask
        else:
            projection = self.method.final_projection(self.tensors())
        if self.collects_gradient and projection.requires_grad:
            projection.register_hook(self._collect)
        return projection

    def _sampled_gates(self) -> Tensor:
        logits = self.mask_logits.float()
        noise = uniform_noise(self.seed, self.name, self.step, self._noise_shape)
        noise = noise[self._head_offset : self._head_offset + len(logits)].to(logits.device, non_blocking=True)
        self.expected_nonzeros = self.method.probability(logits).sum()
        if self.method.name == "l0":
            return self.method.hard_concrete.sample(logits, noise)
        return binary_concrete_sample(logits, noise, self.method.temperature.at(self.step))

    def _collect(self, gradient: Tensor) -> None:
        gradient = gradient.detach().float()
        self.dense_gradient = gradient.clone() if self.dense_gradient is None else self.dense_gradient + gradient
