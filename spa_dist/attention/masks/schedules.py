"""Schedules of mask training as pure functions of the optimizer step, counted from 1; nothing to save, nothing to resume."""

import math
from dataclasses import dataclass


def _progress(step: int, first: int, last: int) -> float:
    """0 up to `first`, 1 from `last` on, linear between."""
    return min(1.0, max(0.0, (step - first) / (last - first))) if last > first else float(step >= last)


@dataclass(frozen=True)
class PruningSchedule:
    """When a magnitude mask is updated, to which sparsity, and how much of it is replaced.

    Updates fall on first, first + every, …, and on last; step 0 is the start, before any update.
    """

    final_sparsity: float
    first: int
    last: int
    every: int
    kind: str = "cubic"
    """`cubic` (gradual pruning) or `constant`: the final sparsity from the first update on."""
    regrow: float = 0.0
    """Share of the kept entries that the first update replaces; it falls to 0 at `last` along half a cosine."""

    def due(self, step: int) -> bool:
        """Whether the mask is updated after this step."""
        if step < max(1, self.first) or step > self.last:
            return False
        return (step - self.first) % self.every == 0 or step == self.last

    def sparsity(self, step: int, initial: float) -> float:
        """s_t = s_f + (s_i − s_f)·(1 − (t − t₀)/(t₁ − t₀))³ between first t₀ and last t₁; s_i before, s_f after."""
        if step < self.first:
            return initial
        if self.kind == "constant":
            return self.final_sparsity
        remaining = 1.0 - _progress(step, self.first, self.last)
        return self.final_sparsity + (initial - self.final_sparsity) * remaining**3

    def regrow_share(self, step: int) -> float:
        """Share of the kept entries that an update at this step takes by gradient: α/2·(1 + cos(π·progress)), as in RigL."""
        return 0.5 * self.regrow * (1.0 + math.cos(math.pi * _progress(step, self.first, self.last)))


@dataclass(frozen=True)
class TemperatureSchedule:
    """Temperature of the binary concrete distribution, from `initial` at step `first` to `final` at step `last`."""

    initial: float = 1.0
    final: float = 0.1
    first: int = 0
    last: int = 0
    kind: str = "geometric"
    """`geometric` or `linear`."""

    def at(self, step: int) -> float:
        """The temperature of an optimizer step."""
        progress = _progress(step, self.first, self.last)
        if self.kind == "linear":
            return self.initial + (self.final - self.initial) * progress
        return self.initial * (self.final / self.initial) ** progress


@dataclass(frozen=True)
class PenaltySchedule:
    """λ, the factor on the gate probability, rising linearly over `warmup` steps."""

    coefficient: float = 0.0
    warmup: int = 0

    def at(self, step: int) -> float:
        """λ of an optimizer step."""
        return self.coefficient * min(1.0, step / self.warmup) if self.warmup else self.coefficient
