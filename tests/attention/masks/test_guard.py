"""The guard: each way to collapse is named, and the repair leaves a sound S; effective rank against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention.masks import Guard, dropped_for, effective_rank, mask_report, repaired_support, revived_values


def faults(projection: torch.Tensor, guard: Guard | None = None) -> list[str]:
    guard = guard or Guard()
    return [fault.quantity for fault in guard.faults(mask_report(projection), tuple(projection.shape[1:]))]  # type: ignore[arg-type]


def test_each_collapse_is_named() -> None:
    torch.manual_seed(0)
    sound = torch.randn(2, 8, 4)
    assert faults(sound) == []
    column, rows, rank, bad = (sound.clone() for _ in range(4))
    column[1, :, 2] = 0
    rows[0, :3] = 0
    rank[1, :, 3] = rank[1, :, 0] * 2
    bad[0, 0, 0] = torch.nan
    assert faults(column) == ["empty columns"]
    assert faults(rows) == ["empty rows"] and faults(rows, Guard(max_empty_rows=0.5)) == []
    assert faults(rank) == ["rank"]
    assert faults(bad) == ["values"]
    assert faults(sound, Guard(max_density=0.5)) == ["density"] and faults(sound * 0)[0] == "density"


def test_a_gate_that_runs_away_is_named() -> None:
    guard = Guard(max_gate=4.0)
    assert list(guard.gate_faults(torch.tensor([1.0, 3.9, 0.26]))) == []
    for wrong in (4.1, 0.24, math.nan, math.inf):
        (fault,) = guard.gate_faults(torch.tensor([1.0, wrong]))
        assert fault.quantity == "gate" and "head 1" in fault.message


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 9), st.integers(1, 6), st.floats(0, 1), st.integers(0, 10**6), st.booleans())
def test_a_repaired_support_is_sound(rows: int, columns: int, density: float, seed: int, forgot: bool) -> None:
    """Whatever is left of S, down to nothing: no empty line, full rank, the least density; what was on stays on."""
    columns = min(rows, columns)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < density
    projection = weight * mask
    weight = projection if forgot else weight
    guard = Guard(min_density=0.2, max_empty_rows=0.0)
    added = repaired_support(projection, weight, guard)
    assert not bool((added & mask & (projection != 0)).any())
    mended = torch.where(added, revived_values(projection, weight, added), projection)
    assert faults(mended[None], guard) == [] and mask_report(mended[None]).empty_rows == 0
    dropped = dropped_for(torch.where(added, mended, weight), mask, added)
    after = (mask | added) & ~dropped
    assert int(dropped.sum()) <= int(added.sum()) and not bool((dropped & added).any())
    assert bool(after.any(0).all()) and bool(after.any(1).all())
    assert mask_report((mended * after)[None]).rank == columns


def test_a_sound_s_is_left_alone() -> None:
    weight = torch.randn(1, 8, 4)
    assert not bool(repaired_support(weight[0], weight[0], Guard()).any())


def test_effective_rank() -> None:
    """d_k′ for equal singular values, 1 for a single one; between, exp of the entropy."""
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0], [2.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert effective_rank(values).tolist() == pytest.approx([3.0, 1.0, math.exp(entropy), 0.0])


def test_regrown_entries_count_though_they_are_zero() -> None:
    projection = torch.eye(4)[None].clone()
    support = projection != 0
    projection[0, 3, 3] = 0
    report = mask_report(projection, support)
    assert (report.density, report.rank, report.empty_columns) == (0.25, 4, 0)
    assert mask_report(projection).rank == 3
