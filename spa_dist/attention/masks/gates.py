"""Random gates with gradients: the binary concrete (Gumbel) and the hard concrete (L0) distribution.

A gate has one logit a = log α. Noise is a uniform u in (0, 1), turned into L = log u − log(1 − u), which is logistic: P(a + L > 0) = σ(a).
"""

import math

import torch
from torch import Tensor


def logistic(uniform: Tensor) -> Tensor:
    """log u − log(1 − u) for u in (0, 1)."""
    return uniform.log() - (-uniform).log1p()


def binary_concrete_sample(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """A mask of 0 and 1 whose gradient is that of σ((a + L)/τ): the straight-through Gumbel estimator.

    For a loss that is at most quadratic in each gate its mean tends to the exact gradient of the expected loss as τ → 0.
    logits and uniform [...]; returns [...] of logits' dtype.
    """
    soft = torch.sigmoid((logits + logistic(uniform)) / temperature)
    hard = (soft > 0.5).to(soft.dtype)
    return hard + (soft - soft.detach())


def binary_concrete_mask(logits: Tensor) -> Tensor:
    """The likelier value of each gate: 1 where a > 0."""
    return (logits > 0).to(logits.dtype)


def binary_concrete_probability(logits: Tensor) -> Tensor:
    """P(gate = 1) = σ(a), at every temperature."""
    return torch.sigmoid(logits)


class HardConcrete:
    """Louizos, Welling and Kingma (2018): z = min(1, max(0, s·(ζ − γ) + γ)) with s = σ((a + L)/β)."""

    def __init__(self, beta: float = 2 / 3, gamma: float = -0.1, zeta: float = 1.1) -> None:
        if beta <= 0 or gamma >= 0 or zeta <= 1:
            raise ValueError(f"a hard concrete gate needs beta > 0, gamma < 0, zeta > 1, not {beta}, {gamma}, {zeta}")
        self.beta, self.gamma, self.zeta = beta, gamma, zeta
        self.shift = beta * math.log(-gamma / zeta)
        """P(z ≠ 0) = σ(a − shift)."""

    def sample(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Gates in [0, 1], exactly 0 and exactly 1 with positive probability; differentiable between."""
        return self._stretch(torch.sigmoid((logits + logistic(uniform)) / self.beta))

    def mask(self, logits: Tensor) -> Tensor:
        """The gates used for evaluation and export: σ(a) stretched and clipped, without noise."""
        return self._stretch(torch.sigmoid(logits))

    def probability(self, logits: Tensor) -> Tensor:
        """P(z ≠ 0), whose sum is the expected number of non-zeros."""
        return torch.sigmoid(logits - self.shift)

    def _stretch(self, s: Tensor) -> Tensor:
        return (s * (self.zeta - self.gamma) + self.gamma).clamp(0.0, 1.0)
