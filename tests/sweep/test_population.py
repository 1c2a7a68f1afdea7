"""Population-based training on known curves: exchanges are decided at equal tokens, from the best to the worst, the same after a kill."""

from pathlib import Path
from typing import Any

import pytest

from spa_dist.sweep.ledger import read_events
from spa_dist.sweep.schema import SweepConfig
from spa_dist.sweep.space import Values, draw
from spa_dist.sweep.state import State
from tests.sweep.support import Simulation, sweep_tree

TOTAL, INTERVAL = 800, 200


def tree(folder: Path) -> dict[str, Any]:
    return sweep_tree(
        folder,
        folder,
        space={"optimizer.lr": {"log_uniform": [1e-4, 1.0]}},
        search={"method": "random", "points": 8, "seed": 1},
        trial={"tokens": TOTAL, "report_tokens": 100},
        scheduler={"name": "pbt", "interval_tokens": INTERVAL, "quantile": 0.25, "resample": 0.0},
    )


def curve(values: Values, seed: int, tokens: int) -> float:
    """Best at a rate of 0.01."""
    return abs(values["optimizer.lr"] - 0.01) + 1.0 / tokens


def facts(state: State) -> list[Any]:
    return [
        [(e["tokens"], e["trial"], e["donor"], e["values"]) for e in state.exploits],
        {t.name: t.reports for t in state.trials.values()},
    ]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_worst_take_over_from_the_best(tmp_path: Path, slots: int) -> None:
    simulation = Simulation(tmp_path / "e.jsonl", tree(tmp_path), curve, slots=slots)
    state = simulation.run()
    assert {trial.status for trial in state.trials.values()} == {"finished"} and len(state.trials) == 8
    assert sorted({event["tokens"] for event in state.exploits}) == [200, 400, 600] and len(state.exploits) == 6
    for event in state.exploits:
        at = {name: trial.loss_at(event["tokens"]) for name, trial in state.trials.items()}
        ranked = sorted(at, key=lambda name: at[name])
        assert event["trial"] in ranked[-2:] and event["donor"] in ranked[:2]
        assert 1e-4 <= event["values"]["optimizer.lr"] <= 1.0


def test_values_are_the_donors_times_a_factor(tmp_path: Path) -> None:
    """The first exchange starts from what the search drew."""
    state = Simulation(tmp_path / "e.jsonl", tree(tmp_path), curve, slots=8).run()
    drawn = {t.name: v for t, v in zip(state.trials.values(), _drawn(tmp_path))}
    for event in state.exploits[:2]:
        ratio = event["values"]["optimizer.lr"] / drawn[event["donor"]]
        assert any(ratio == pytest.approx(factor) for factor in (0.8, 1.25))


def _drawn(folder: Path) -> list[float]:
    sweep = SweepConfig.model_validate(tree(folder))
    return [draw(sweep.space, 1, number, {})["optimizer.lr"] for number in range(8)]


def test_nobody_is_ahead_of_an_exchange(tmp_path: Path) -> None:
    """In the order in which things happened, no report lies beyond an interval whose exchanges are not all decided."""
    Simulation(tmp_path / "e.jsonl", tree(tmp_path), curve, slots=3).run()
    settled = 0
    for event in read_events(tmp_path / "e.jsonl"):
        if event["event"] == "settled":
            settled = event["tokens"]
        if event["event"] == "report":
            assert event["tokens"] <= settled + INTERVAL


@pytest.mark.parametrize("cut", range(1, 64, 5))
def test_a_killed_population_goes_on_the_same(tmp_path: Path, cut: int) -> None:
    whole = facts(Simulation(tmp_path / "whole.jsonl", tree(tmp_path), curve, slots=2).run())
    Simulation(tmp_path / "cut.jsonl", tree(tmp_path), curve, slots=2).run(reports=cut)
    assert facts(Simulation(tmp_path / "cut.jsonl", tree(tmp_path), curve, slots=2).run()) == whole
