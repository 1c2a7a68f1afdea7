"""Schedules at their ends and between, against the formulas written out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention.masks import PenaltySchedule, PruningSchedule, TemperatureSchedule

steps = st.integers(0, 500)


@settings(deadline=None)
@given(st.floats(0, 0.99), st.floats(0, 0.99), steps, st.integers(1, 300), st.integers(1, 50), st.integers(0, 1000))
def test_cubic_sparsity(initial: float, final: float, first: int, length: int, every: int, step: int) -> None:
    """Eq. of the cubic schedule between its ends, constant outside, never out of the range of its ends."""
    schedule = PruningSchedule(final, first, first + length, every)
    expected = final + (initial - final) * (1 - min(max(step - first, 0), length) / length) ** 3
    assert schedule.sparsity(step, initial) == pytest.approx(expected, abs=1e-12)
    assert min(initial, final) - 1e-12 <= schedule.sparsity(step, initial) <= max(initial, final) + 1e-12


@settings(deadline=None)
@given(steps, st.integers(1, 300), st.integers(1, 50))
def test_updates_fall_on_the_grid_and_on_the_last_step(first: int, length: int, every: int) -> None:
    schedule = PruningSchedule(0.8, first, first + length, every)
    due = [step for step in range(0, first + length + 2 * every) if schedule.due(step)]
    expected = sorted({*range(first, first + length + 1, every), first + length} - {0})
    assert due == expected


def test_constant_sparsity_and_falling_regrowth() -> None:
    """RigL: the target from the first update on; α/2·(1 + cos) of the kept entries, none at the last."""
    schedule = PruningSchedule(0.9, 10, 110, 10, kind="constant", regrow=0.3)
    assert schedule.sparsity(9, 0.5) == 0.5 and schedule.sparsity(10, 0.5) == 0.9
    shares = [schedule.regrow_share(step) for step in (10, 35, 60, 85, 110)]
    assert shares == pytest.approx([0.3, 0.15 * (1 + math.sqrt(0.5)), 0.15, 0.15 * (1 - math.sqrt(0.5)), 0.0])


def test_temperature_and_penalty() -> None:
    """1.0 → 0.1: geometric halves the logarithm at half time, linear the value; λ rises linearly."""
    geometric, linear = TemperatureSchedule(1.0, 0.1, 100, 300), TemperatureSchedule(1.0, 0.1, 100, 300, "linear")
    assert [geometric.at(step) for step in (0, 100, 200, 300, 900)] == pytest.approx([1, 1, math.sqrt(0.1), 0.1, 0.1])
    assert [linear.at(step) for step in (0, 100, 200, 300, 900)] == pytest.approx([1, 1, 0.55, 0.1, 0.1])
    assert [PenaltySchedule(4.0, 8).at(step) for step in (0, 2, 8, 99)] == [0.0, 1.0, 4.0, 4.0]
    assert PenaltySchedule(4.0).at(1) == 4.0
