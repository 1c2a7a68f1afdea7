"""Tests over seeds: known values, and an integral of Student's density."""

import math

import numpy as np
import pytest

from spa_dist.comparison.statistics import compare_paired, deviation, student_cdf

# Quantiles of printed tables.
TABLE = [
    (1, 6.313752, 0.95),
    (2, 4.302653, 0.975),
    (3, 2.353363, 0.95),
    (4, 4.604095, 0.995),
    (5, 2.570582, 0.975),
    (10, 1.812461, 0.95),
]


@pytest.mark.parametrize(("degrees", "t", "probability"), TABLE)
def test_distribution_of_tables(degrees: int, t: float, probability: float) -> None:
    assert student_cdf(t, degrees) == pytest.approx(probability, abs=1e-6)
    assert student_cdf(-t, degrees) == pytest.approx(1 - probability, abs=1e-6)
    assert student_cdf(0.0, degrees) == 0.5


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 20])
def test_distribution_is_the_integral_of_the_density(degrees: int) -> None:
    t = 1.37
    grid = np.linspace(0.0, t, 20_001)
    density = (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
    density *= math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    assert student_cdf(t, degrees) == pytest.approx(0.5 + np.trapezoid(density, grid), abs=1e-8)


def test_paired_tests_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2√3; with two degrees of freedom P(|T| > t) = 1 − t/√(t² + 2)."""
    found = compare_paired([11.0, 22.0, 33.0], [10.0, 20.0, 30.0], margin=5.0)
    t, far = 2 * math.sqrt(3), 3 * math.sqrt(3)
    assert found.seeds == 3 and found.difference == pytest.approx(2.0)
    assert found.p_value == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert found.equivalence_p == pytest.approx((1 - far / math.sqrt(far * far + 2)) / 2)
    assert found.equivalent and not found.differs
    outside = compare_paired([11.0, 22.0, 33.0], [10.0, 20.0, 30.0], margin=1.0)
    assert outside.equivalence_p is not None and outside.equivalence_p > 0.5


def test_the_sign_does_not_matter_to_p() -> None:
    first, second = [1.0, 2.5, 2.0, 4.0], [1.5, 2.0, 3.5, 5.0]
    one, other = compare_paired(first, second, 1.0), compare_paired(second, first, 1.0)
    assert one.p_value == pytest.approx(other.p_value) and one.equivalence_p == pytest.approx(other.equivalence_p)
    assert one.difference == -other.difference


def test_what_has_no_spread_has_no_p() -> None:
    """One seed, or three whose differences are one number: there is nothing to set the difference against."""
    assert deviation([1.0]) is None
    for found in (compare_paired([1.0], [2.0], 0.1), compare_paired([1.0, 1.0], [1.0, 1.0], 0.1)):
        assert found.p_value is None and found.equivalence_p is None and not found.differs and not found.equivalent
    with pytest.raises(ValueError, match="do not pair"):
        compare_paired([1.0], [], 0.1)
