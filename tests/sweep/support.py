"""Small sweeps for tests: a config as a dict, and a trainer whose curves are known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spa_dist.errors import ConfigError
from spa_dist.sweep.control import Control, jobs_for
from spa_dist.sweep.jobs import Job
from spa_dist.sweep.ledger import Ledger, read_events
from spa_dist.sweep.load import check_sweep
from spa_dist.sweep.schema import SweepConfig
from spa_dist.sweep.space import Values
from spa_dist.sweep.state import State

Curve = Callable[[Values, int, int], float]
"""(values, seed, tokens) → validation loss."""


def base_config(data: Path) -> dict[str, Any]:
    """A run config whose steps take milliseconds."""
    return {
        "run": {"steps": 8, "seed": 3},
        "model": {
            "num_layers": 1, "hidden_size": 32, "num_heads": 2, "head_dim": 16, "value_dim": 16, "sequence_length": 32,
            "dropout": 0.1,
        },
        "attention": {"d_proj": 8},
        "batch": {"global_size": 8},
        "data": {"path": str(data)},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 4},
        "checkpoint": {"every": 2},
        "logging": {"every": 1, "tensorboard": False},
        "evaluation": {"sequences": 16},
    }  # fmt: skip


STEP_TOKENS = 8 * 32
"""Tokens of a step of `base_config`."""


def sweep_tree(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """A sweep config over `base_config`, which it writes into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.json"
    base.write_text(json.dumps(base_config(data)))
    return {
        "name": "test",
        "dir": str(folder / "sweep"),
        "base": str(base),
        "space": {"attention.d_proj": {"grid": [4, 8]}},
        "trial": {"tokens": 8 * STEP_TOKENS, "report_tokens": 4 * STEP_TOKENS, "workers": 2},
        "cluster": {"nodes": [{"cpus": 4}]},
    } | changes


class CurvePoints:
    """Stands where `Points` does, for a trainer of known curves; `bad` says which points cannot be trained."""

    def __init__(self, seeds: list[int], bad: Callable[[Values], str | None], warmup: Callable[[Values], int]):
        self.seeds, self._bad, self._warmup = seeds, bad, warmup

    def examine(self, values: Values) -> dict[str, Any]:
        """What `Points.examine` says."""
        return {"infeasible": self._bad(values), "warmup_tokens": self._warmup(values)}


class Simulation:
    """Runs a sweep's decisions against curves: `slots` trials at a time, one report each in turn."""

    def __init__(
        self,
        path: Path,
        tree: dict[str, Any],
        curve: Curve,
        *,
        slots: int,
        bad: Callable[[Values], str | None] = lambda values: None,
        warmup: Callable[[Values], int] = lambda values: 0,
    ):
        self.sweep = SweepConfig.model_validate(tree)
        check_sweep(self.sweep)
        self.curve = curve
        self.points = CurvePoints(self.sweep.seeds or [3], bad, warmup)
        self.state = State()
        for event in read_events(path):
            self.state.apply(event)
        self.ledger = Ledger(path)
        self.now = 0.0
        jobs = jobs_for(self.sweep, self.points.seeds)
        self.control = Control(self.sweep, self.points, self.ledger, self.state, jobs, slots, clock=self._tick)  # type: ignore[arg-type]
        self.positions: dict[str, int] = {}
        self.log: list[tuple[str, int, str | None]] = []

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def run(self, reports: int | None = None) -> State:
        """To the end, or as if killed after so many reports."""
        try:
            return self._run(reports)
        finally:
            self.ledger.close()

    def _run(self, reports: int | None) -> State:
        self.control.record({"event": "session"})
        active: list[Job] = []
        while True:
            while isinstance(job := self.control.next_job(), Job):
                self.control.started(job.trial)
                self.positions[job.trial] = self._begin(job)
                active.append(job)
            if not active:
                assert job is None, "the sweep waits for nothing"
                return self.state
            job = active.pop(0)
            if reports is not None and len(self.log) >= reports:
                return self.state
            if self._advance(job):
                active.append(job)

    def _begin(self, job: Job) -> int:
        return job.donor.tokens if job.donor else self.state.trials[job.trial].tokens

    def _advance(self, job: Job) -> bool:
        """One report; whether the trial goes on."""
        trial = self.state.trials[job.trial]
        tokens = self.positions[job.trial] = self.positions[job.trial] + self.sweep.trial.report_tokens
        loss = self.curve(self.state.points[trial.point].values, trial.seed, tokens)
        answer = self.control.reported(job.trial, {"tokens": tokens, "validation_loss": loss, "tokens_per_second": 1.0})
        self.log.append((job.trial, tokens, answer))
        if answer is None and tokens < job.stop_at:
            return True
        self.control.ended(job.trial, "done")
        return False


def error_of(action: Callable[[], Any]) -> str:
    """The one line of the `ConfigError` that an action ends with."""
    try:
        action()
    except ConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("no error")
