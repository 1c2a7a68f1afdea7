"""Early stopping on curves that are known: nobody is stopped before its warm-up ends, and budgets are equal where losses are compared."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.sweep.asha import rungs
from spa_dist.sweep.schema import AshaScheduler, TrialConfig
from spa_dist.sweep.space import Values
from spa_dist.sweep.state import State
from tests.sweep.support import Simulation, sweep_tree

REPORT, TOTAL = 100, 1600
LATE = 9
"""The point that is worst until its sparsity warm-up ends at 400 tokens, and best from then on."""


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    return sweep_tree(
        folder,
        folder,
        space={"optimizer.lr": {"grid": list(range(1, 10))}},
        trial={"tokens": TOTAL, "report_tokens": REPORT},
        scheduler={"name": "asha", "reduction": 3},
        **changes,
    )


def curve(values: Values, seed: int, tokens: int) -> float:
    """Better for a smaller value, but for the late one."""
    if values["optimizer.lr"] == LATE:
        return 100.0 if tokens < 400 else 0.5
    return values["optimizer.lr"] + 100.0 / tokens


def outcome(state: State) -> dict[int, tuple[str, int]]:
    return {state.points[t.point].values["optimizer.lr"]: (t.status, t.tokens) for t in state.trials.values()}


def test_the_late_one_is_kept(tmp_path: Path) -> None:
    """With its warm-up known it is never stopped and wins, while most of the others are."""
    state = Simulation(
        tmp_path / "e.jsonl", tree(tmp_path), curve, slots=9, warmup=lambda v: 400 * (v["optimizer.lr"] == LATE)
    ).run()
    ends = outcome(state)
    assert ends[LATE] == ("finished", TOTAL)
    assert sum(status == "stopped" for status, _ in ends.values()) >= 4


def test_a_point_in_its_warm_up_is_not_counted_either(tmp_path: Path) -> None:
    """Were it, the good first curve would be stopped by losses that mean nothing yet."""

    def flattering(values: Values, seed: int, tokens: int) -> float:
        return -100.0 if values["optimizer.lr"] == LATE and tokens < 400 else values["optimizer.lr"]

    changed = tree(tmp_path)
    changed["space"] = {"optimizer.lr": {"grid": [LATE, 1]}}
    state = Simulation(
        tmp_path / "e.jsonl", changed, flattering, slots=2, warmup=lambda v: 400 * (v["optimizer.lr"] == LATE)
    ).run()
    assert outcome(state)[1] == ("finished", TOTAL)


def test_without_its_warm_up_it_would_be_lost(tmp_path: Path) -> None:
    """The test of the test: the same curves, nothing known of a warm-up."""
    state = Simulation(tmp_path / "e.jsonl", tree(tmp_path), curve, slots=9).run()
    assert outcome(state)[LATE] == ("stopped", REPORT)


def test_rungs_are_multiples_of_the_report_interval() -> None:
    trial = TrialConfig(tokens=TOTAL, report_tokens=REPORT)
    assert rungs(AshaScheduler(name="asha", reduction=2), trial) == [100, 200, 400, 800]
    assert rungs(AshaScheduler(name="asha", reduction=4, first_tokens=150), trial) == [200, 800]
    assert rungs(AshaScheduler(name="asha", reduction=2, first_tokens=TOTAL), trial) == []


@settings(max_examples=25)
@given(st.integers(1, 9), st.permutations(range(1, 10)), st.integers(2, 4))
def test_decisions_are_those_of_a_plain_count(slots: int, order: list[int], reduction: int) -> None:
    """Replayed from the log by brute force: a trial is stopped exactly when at least ⌈n/η⌉ of the n at its rung so far are better."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        changed = tree(root, name="x") | {"scheduler": {"name": "asha", "reduction": reduction}}
        changed["space"] = {"optimizer.lr": {"grid": order}}
        simulation = Simulation(root / "e.jsonl", changed, curve, slots=slots)
        state = simulation.run()
    seen: dict[int, list[float]] = defaultdict(list)
    rung_tokens = {REPORT * reduction**k for k in range(10)}
    for name, tokens, answer in simulation.log:
        if tokens == TOTAL or tokens not in rung_tokens:
            assert answer is None
            continue
        loss = state.trials[name].loss_at(tokens)
        seen[tokens].append(loss)
        better = sum(other < loss for other in seen[tokens])
        assert (answer is not None) == (better >= math.ceil(len(seen[tokens]) / reduction)), (name, tokens, answer)


def test_a_point_falls_with_all_of_its_seeds(tmp_path: Path) -> None:
    """No seed of a fallen point is started, and none that runs is let go on past where it fell."""

    def by_seed(values: Values, seed: int, tokens: int) -> float:
        return values["optimizer.lr"] + (-3.0 if (values["optimizer.lr"], seed) == (3, 2) else 0.0)

    changed = tree(tmp_path, seeds=[1, 2]) | {"scheduler": {"name": "asha", "reduction": 2}}
    changed["space"] = {"optimizer.lr": {"grid": [1, 2, 3]}}
    simulation = Simulation(tmp_path / "e.jsonl", changed, by_seed, slots=1)
    state = simulation.run()
    third = [trial for trial in state.trials.values() if state.points[trial.point].values["optimizer.lr"] == 3]
    assert [(trial.seed, trial.status) for trial in third] == [(1, "stopped")]
    assert [t.status for t in state.of_point(0)] == ["finished", "finished"]


def test_seeds_side_by_side(tmp_path: Path) -> None:
    """Two seeds at a time: their mean at the rung decides, and the lucky one, which passed alone, stops with its point."""

    def apart(values: Values, seed: int, tokens: int) -> float:
        if values["optimizer.lr"] == 1.4:
            return 0.5 if seed == 1 else 5.0
        return 2.0 * values["optimizer.lr"]

    changed = tree(tmp_path, seeds=[1, 2]) | {"scheduler": {"name": "asha", "reduction": 2}}
    changed["space"] = {"optimizer.lr": {"grid": [1, 1.4, 1.2]}}
    state = Simulation(tmp_path / "e.jsonl", changed, apart, slots=2).run()
    assert [t.status for t in state.of_point(0)] == ["finished", "finished"]
    for trial in state.of_point(1):
        assert trial.status == "stopped" and trial.tokens <= 2 * REPORT


def test_a_killed_sweep_decides_the_same(tmp_path: Path) -> None:
    """Killed after each number of reports and gone on with: the same trials stop at the same rungs for one trial at a time."""
    whole = outcome(Simulation(tmp_path / "whole.jsonl", tree(tmp_path), curve, slots=1).run())
    for cut in range(1, 40, 3):
        path = tmp_path / f"cut{cut}.jsonl"
        Simulation(path, tree(tmp_path), curve, slots=1).run(reports=cut)
        assert outcome(Simulation(path, tree(tmp_path), curve, slots=1).run()) == whole, cut
