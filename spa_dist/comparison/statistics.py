"""Means over seeds, and the paired tests that say whether two variants differ.

Seeds pair runs: with one seed two variants see the same data and start from the same weights where they share them, so that the
difference of a pair has less noise than either. With three seeds a test has two degrees of freedom, and little power: a large p
value is no sign of equality. "No difference" is claimed by the equivalence test alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (n − 1), or None for a single value."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def student_cdf(t: float, degrees: int) -> float:
    """P(T ≤ t) of Student's t with an integer number of degrees of freedom, a finite series (Abramowitz, Stegun, 26.7.3–4)."""
    if degrees < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, not {degrees}")
    if math.isinf(t):
        return float(t > 0)
    theta = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for k in range(3 if odd else 2, degrees, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    two_sided = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return 0.5 + 0.5 * two_sided


@dataclass(frozen=True)
class PairedComparison:
    """Differences a − b of pairs of runs, one pair for each seed."""

    seeds: int
    difference: float
    """Mean of a − b."""
    p_value: float | None
    """Two-sided paired t-test of a mean difference of 0; None for fewer than two seeds, and where all differences are the same number."""
    equivalence_p: float | None
    """Larger p of the two one-sided tests (TOST): below 0.05, the mean difference lies within ± margin."""
    margin: float

    @property
    def differs(self) -> bool:
        """Whether the t-test finds a difference at 5 %."""
        return self.p_value is not None and self.p_value < 0.05

    @property
    def equivalent(self) -> bool:
        """Whether the equivalence test finds the difference within the margin at 5 %."""
        return self.equivalence_p is not None and self.equivalence_p < 0.05


def compare_paired(first: Sequence[float], second: Sequence[float], margin: float) -> PairedComparison:
    """Compare two variants by their values at the same seeds, in the same order."""
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs of runs are compared: {len(first)} values do not pair with {len(second)}")
    differences = [a - b for a, b in zip(first, second)]
    centre, spread = mean(differences), deviation(differences)
    if not spread:
        return PairedComparison(len(differences), centre, None, None, margin)
    degrees = len(differences) - 1
    error = spread / math.sqrt(len(differences))
    p = 2 * student_cdf(-abs(centre / error), degrees)
    above = student_cdf((centre - margin) / error, degrees)
    below = student_cdf(-(centre + margin) / error, degrees)
    return PairedComparison(len(differences), centre, p, max(above, below), margin)
