"""Grids, draws, conditions, and Optuna's proposals."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spa_dist.sweep.resources import Node, trials_at_a_time
from spa_dist.sweep.schema import SpaceKey, TrialConfig
from spa_dist.sweep.space import Space, combinations, draw
from tests.sweep.support import Simulation, error_of, sweep_tree


def space_of(tree: dict[str, Any]) -> Space:
    return {key: SpaceKey.model_validate(value) for key, value in tree.items()}


CONDITIONAL = space_of(
    {
        "a.block": {"grid": [[4, 4], [8, 8]], "when": {"a.pattern": ["block"]}},
        "a.pattern": {"grid": ["random", "block"]},
        "a.width": {"grid": [1, 2, 3]},
    }
)


def test_grid_is_the_product_with_its_conditions() -> None:
    """Against a product of everything, from which what cannot be is struck out."""
    found = combinations(CONDITIONAL)
    expected = []
    for block, pattern, width in itertools.product([[4, 4], [8, 8], None], ["random", "block"], [1, 2, 3]):
        if (block is not None) == (pattern == "block"):
            entry = {"a.block": block, "a.pattern": pattern, "a.width": width}
            expected.append({key: value for key, value in entry.items() if value is not None})
    assert len(found) == len(expected) == 9
    assert all(entry in found for entry in expected)


RANGES = space_of(
    {
        "b.kind": {"choice": ["x", "y"]},
        "b.rate": {"log_uniform": [1e-4, 1e-1]},
        "b.count": {"uniform": [3, 5], "when": {"b.kind": ["y"]}},
        "b.share": {"uniform": [0, 0.5]},
        "b.size": {"log_uniform": [1, 100]},
    }
)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_draws_lie_in_their_domains(seed: int, number: int) -> None:
    """Bounds, integers where both bounds are, conditions; and the same again for the same seed and number."""
    values = draw(RANGES, seed, number, {})
    assert values == draw(RANGES, seed, number, {})
    assert ("b.count" in values) == (values["b.kind"] == "y")
    assert 1e-4 <= values["b.rate"] <= 1e-1 and 0 <= values["b.share"] <= 0.5
    assert isinstance(values["b.size"], int) and 1 <= values["b.size"] <= 100
    assert values.get("b.count", 3) in (3, 4, 5)


def test_draws_spread() -> None:
    """Half of the log-uniform rates lie below the geometric mean of the bounds, half of the uniform shares below the arithmetic."""
    drawn = [draw(RANGES, 0, number, {}) for number in range(2000)]
    assert sum(v["b.rate"] < math.sqrt(1e-5) for v in drawn) == pytest.approx(1000, abs=100)
    assert sum(v["b.share"] < 0.25 for v in drawn) == pytest.approx(1000, abs=100)
    assert {v["b.count"] for v in drawn if "b.count" in v} == {3, 4, 5}


def test_random_search_tries_each_grid_with_each_draw(tmp_path: Path) -> None:
    tree = sweep_tree(tmp_path, tmp_path, search={"method": "random", "points": 3, "seed": 5})
    tree["space"]["optimizer.lr"] = {"uniform": [0.1, 0.2]}
    state = Simulation(tmp_path / "e.jsonl", tree, lambda values, seed, tokens: 1.0, slots=2).run()
    assert [point.values["attention.d_proj"] for point in state.points] == [4, 8] * 3
    assert len({point.values["optimizer.lr"] for point in state.points}) == 6


def optuna_tree(folder: Path, points: int, **changes: Any) -> dict[str, Any]:
    return sweep_tree(
        folder,
        folder,
        space={
            "optimizer.lr": {"log_uniform": [1e-4, 1.0]},
            "attention.pattern": {"choice": ["random", "block"]},
            "attention.block": {"choice": [[4, 4], [8, 8]], "when": {"attention.pattern": ["block"]}},
        },
        search={"method": "optuna", "points": points, "seed": 2, "startup_points": 8},
        **changes,
    )


def bowl(values: dict[str, Any], seed: int, tokens: int) -> float:
    """Best at a rate of 0.03 with blocks of 8; the seeds are noise that cancels in the mean."""
    if values["optimizer.lr"] > 0.5:
        return math.nan
    penalty = 0.0 if values.get("attention.block") == [8, 8] else 0.5
    return (math.log10(values["optimizer.lr"]) + 1.5) ** 2 + penalty + (5.0 if seed == 1 else -5.0)


def test_optuna_learns_from_means(tmp_path: Path) -> None:
    """Its later points are better than its random first ones, though each seed alone says little; conditions hold."""
    tree = optuna_tree(tmp_path, 40, seeds=[1, 2])
    state = Simulation(tmp_path / "e.jsonl", tree, bowl, slots=4).run()
    assert len(state.points) == 40 and all(trial.status == "finished" for trial in state.trials.values())
    means = [sum(bowl(point.values, seed, 0) for seed in (1, 2)) / 2 for point in state.points]
    means = [mean if math.isfinite(mean) else math.inf for mean in means]
    assert sorted(means[24:])[8] < sorted(means[:8])[4] and min(means) < 0.1
    for point in state.points:
        assert ("attention.block" in point.values) == (point.values["attention.pattern"] == "block")


def test_optuna_with_two_objectives_and_a_kill(tmp_path: Path) -> None:
    """Killed after any number of reports, it proposes the points that it would have, for one trial at a time."""
    tree = optuna_tree(tmp_path, 14, objectives=["validation_loss", "tokens_per_second"])
    whole = Simulation(tmp_path / "whole.jsonl", tree, bowl, slots=1).run()
    for cut in (1, 7, 13, 22):
        path = tmp_path / f"cut{cut}.jsonl"
        Simulation(path, tree, bowl, slots=1).run(reports=cut)
        state = Simulation(path, tree, bowl, slots=1).run()
        assert [point.values for point in state.points] == [point.values for point in whole.points]


def trial(**changes: Any) -> TrialConfig:
    return TrialConfig.model_validate({"tokens": 1, "report_tokens": 1} | changes)


def test_what_fits() -> None:
    """Whole nodes, parts of nodes, shares of a GPU."""
    nodes = [Node(64, 8), Node(64, 8)]
    assert trials_at_a_time(nodes, trial(workers=8, gpus_per_worker=1.0, placement="STRICT_PACK")) == 2
    assert trials_at_a_time(nodes, trial(workers=16, gpus_per_worker=1.0)) == 1
    assert trials_at_a_time(nodes, trial(workers=1, gpus_per_worker=0.25, cpus_per_worker=2.0)) == 64
    assert trials_at_a_time(nodes, trial(workers=3, gpus_per_worker=1.0, placement="STRICT_PACK")) == 4
    assert trials_at_a_time(nodes, trial(workers=3, gpus_per_worker=1.0)) == 5
    assert trials_at_a_time([Node(1, 1)], trial(gpus_per_worker=0.1, cpus_per_worker=0.1)) == 10
    assert "on one node" in error_of(
        lambda: trials_at_a_time(nodes, trial(workers=9, gpus_per_worker=1.0, placement="STRICT_PACK"))
    )
    assert "trial: a trial needs 17" in error_of(lambda: trials_at_a_time(nodes, trial(workers=17, gpus_per_worker=1.0)))
