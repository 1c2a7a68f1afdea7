"""Budgets, crashes, kills: what a sweep does with what happens to it. And taking over a donor's checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from spa_dist.sweep.job import TrialSpec
from spa_dist.sweep.jobs import Job
from spa_dist.sweep.results import rows
from spa_dist.sweep.state import State
from spa_dist.sweep.trial import adopt_checkpoint
from spa_dist.sweep.worker import measured_rate
from tests.sweep.support import STEP_TOKENS, Simulation, sweep_tree


def flat(values: dict[str, Any], seed: int, tokens: int) -> float:
    return 1.0


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    return sweep_tree(folder, folder, space={"optimizer.lr": {"grid": [1, 2, 3, 4]}}, **changes)


def statuses(state: State) -> list[str]:
    return [trial.status for trial in state.trials.values()]


TRIAL_TOKENS = 8 * STEP_TOKENS


def test_budget_of_trials(tmp_path: Path) -> None:
    state = Simulation(tmp_path / "e.jsonl", tree(tmp_path, budget={"trials": 3}), flat, slots=2).run()
    assert statuses(state) == ["finished"] * 3


@pytest.mark.parametrize("budget", [{"tokens": 2 * TRIAL_TOKENS + 1}, {"wall_minutes": 25 / 60}], ids=["tokens", "wall"])
def test_a_spent_budget_stops_at_the_next_report_and_resumes(tmp_path: Path, budget: dict[str, Any]) -> None:
    """What ran is unfinished, with the reason; with more budget it goes on from where it was, and nothing finished runs again."""
    path = tmp_path / "e.jsonl"
    first = Simulation(path, tree(tmp_path, budget=budget), flat, slots=2)
    state = first.run()
    assert "finished" in statuses(state) and "unfinished" in statuses(state)
    reason = next(trial.reason for trial in state.trials.values() if trial.status == "unfinished")
    assert reason.startswith("budget.") and reason.endswith("is spent")
    second = Simulation(path, tree(tmp_path), flat, slots=2)
    state = second.run()
    assert statuses(state) == ["finished"] * 4
    seen = [(name, tokens) for name, tokens, _ in first.log + second.log]
    assert len(seen) == len(set(seen)) == 8


def test_gpu_hours_count_workers_and_shares(tmp_path: Path) -> None:
    """A clock that a test moves: two GPUs for half an hour are one GPU-hour."""
    changed = tree(tmp_path, budget={"gpu_hours": 1.0})
    changed["trial"] |= {"gpus_per_worker": 1.0}
    simulation = Simulation(tmp_path / "e.jsonl", changed, flat, slots=1)
    control = simulation.control
    control.record({"event": "session"})
    job = control.next_job()
    assert isinstance(job, Job)
    control.started(job.trial)
    simulation.now += 1790.0
    assert control.budget_spent() is None
    simulation.now += 20.0
    assert control.budget_spent() == "budget.gpu_hours=1 is spent"
    simulation.ledger.close()


def test_a_crash_does_not_end_the_sweep(tmp_path: Path) -> None:
    """A crashed trial, one whose driver saw it end without a word, and one that turned out infeasible are told apart."""
    simulation = Simulation(tmp_path / "e.jsonl", tree(tmp_path), flat, slots=4)
    control = simulation.control
    control.record({"event": "session"})
    jobs = [control.next_job() for _ in range(4)]
    for job in jobs:
        assert isinstance(job, Job)
        control.started(job.trial)
    control.ended("p0000-s3", "crashed", "out of memory")
    control.ended("p0001-s3", "infeasible", "fp16 is not supported")
    control.ended("p0002-s3", "done")
    for tokens in (4 * STEP_TOKENS, TRIAL_TOKENS):
        assert control.reported("p0003-s3", {"tokens": tokens, "validation_loss": 1.0}) is None
    control.ended("p0003-s3", "done")
    assert control.next_job() is None
    table = {row.point: (row.status, row.reason) for row in rows(simulation.state, simulation.sweep)}
    assert table == {
        0: ("crashed", "out of memory"), 1: ("infeasible", "fp16 is not supported"),
        2: ("crashed", "ended at 0 tokens without a word"), 3: ("finished", ""),
    }  # fmt: skip
    simulation.ledger.close()


def test_a_killed_driver_leaves_its_trials_unfinished(tmp_path: Path) -> None:
    """And the time that they held their workers counts up to the last that was heard."""
    path = tmp_path / "e.jsonl"
    Simulation(path, tree(tmp_path), flat, slots=2).run(reports=3)
    simulation = Simulation(path, tree(tmp_path), flat, slots=2)
    before = simulation.state.last_event
    simulation.control.record({"event": "session"})
    assert statuses(simulation.state) == ["finished", "unfinished", "unfinished"][: len(simulation.state.trials)]
    assert simulation.state.wall_seconds == before - 1.0
    simulation.ledger.close()


def spec(folder: Path, donor: Path) -> TrialSpec:
    return TrialSpec("t", str(folder), {}, 0, 1, "", str(donor / "checkpoints"), 4, {}, 0, 1.0)


def checkpoint(run_dir: Path, step: int, content: str) -> Path:
    folder = run_dir / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(content)
    (folder / "manifest.json").write_text(json.dumps({"of": content}))
    return folder


def test_taking_over_a_checkpoint(tmp_path: Path) -> None:
    """The donor's replaces the own one of its step and all later ones, once: what was trained since is not undone."""
    donor, own = tmp_path / "donor", tmp_path / "own"
    checkpoint(donor, 4, "donor")
    checkpoint(own, 2, "own2")
    mine = checkpoint(own, 4, "own4")
    later = checkpoint(own, 6, "own6")
    adopt_checkpoint(spec(own, donor))
    assert (mine / "weights").read_text() == "donor" and json.loads((mine / "manifest.json").read_text()) == {"of": "donor"}
    assert not later.exists() and (own / "checkpoints/step_00000002/manifest.json").exists()
    checkpoint(own, 6, "trained on")
    adopt_checkpoint(spec(own, donor))
    assert (later / "weights").read_text() == "trained on"


def test_a_take_over_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    """Until its manifest is there it is no checkpoint, and it is not marked as done."""
    donor, own = tmp_path / "donor", tmp_path / "own"
    checkpoint(donor, 4, "donor")
    half = own / "checkpoints/step_00000004"
    half.mkdir(parents=True)
    (half / "weights").write_text("hal")
    adopt_checkpoint(spec(own, donor))
    assert (half / "weights").read_text() == "donor" and (half / "manifest.json").exists()


def test_measured_rate(tmp_path: Path) -> None:
    """The median without the first line; evaluations say no rate."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "tokens_per_second": r} for s, r in enumerate([1.0, 30.0, 10.0, 20.0])] + [
        {"step": 4, "validation_loss": 1.0}
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_rate(path) == 20.0
    path.write_text("")
    assert measured_rate(path) is None
