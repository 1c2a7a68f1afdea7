"""The sweep's decisions: what runs next, what a report is answered, when it is over. Knows the ledger, and nothing of Ray."""

import time
from collections.abc import Callable

from spa_dist.sweep import asha
from spa_dist.sweep.jobs import Job, Jobs, ListedPoints, SearchJobs, Wait
from spa_dist.sweep.ledger import Event, Ledger
from spa_dist.sweep.points import Points
from spa_dist.sweep.population import PopulationJobs
from spa_dist.sweep.schema import AshaScheduler, PbtScheduler, SweepConfig
from spa_dist.sweep.state import State


class Control:
    """Everything that happens goes through here, and to disk before anything follows from it."""

    def __init__(
        self,
        sweep: SweepConfig,
        points: Points,
        ledger: Ledger,
        state: State,
        jobs: Jobs,
        slots: int,
        clock: Callable[[], float] = time.time,
    ):
        self.sweep, self.points, self.state = sweep, points, state
        self._ledger, self._jobs, self._slots, self._clock = ledger, jobs, slots, clock
        self.running: dict[str, Job] = {}
        self._verdicts: dict[str, tuple[str, str]] = {}
        self.changed = True
        """Set by each event; whoever shows the state clears it."""

    def record(self, event: Event) -> None:
        """Put an event on disk and into the state."""
        event = {"time": self._clock(), **event}
        self._ledger.append(event)
        self.state.apply(event)
        self.changed = True

    def next_job(self) -> Job | Wait | None:
        """A trial to start now, wait, or None when the sweep has no more to do."""
        if self.budget_spent() is not None:
            return Wait() if self.running else None
        if len(self.running) >= self._slots:
            return Wait()
        while True:
            found = self._jobs.next(self.state, set(self.running))
            if not isinstance(found, dict):
                if isinstance(found, Job):
                    self.running[found.trial] = found
                return found
            if found["event"] == "point":
                found |= self.points.examine(found["values"])
            self.record(found)

    def started(self, name: str) -> None:
        """The trial's function runs."""
        self.record({"event": "start", "trial": name})

    def reported(self, name: str, metrics: Event) -> str | None:
        """Take in a report; returns why the trial must stop, or None."""
        self.record({"event": "report", "trial": name, **metrics})
        tokens = int(metrics["tokens"])
        verdict = self._verdict(name, tokens)
        if verdict is None:
            return None
        self._verdicts[name] = verdict
        self.record({"event": "verdict", "trial": name, "tokens": tokens, "status": verdict[0], "reason": verdict[1]})
        return verdict[1]

    def _verdict(self, name: str, tokens: int) -> tuple[str, str] | None:
        if tokens >= self.running[name].stop_at:
            return None
        scheduler = self.sweep.scheduler
        if isinstance(scheduler, AshaScheduler):
            rungs = asha.rungs(scheduler, self.sweep.trial)
            reason = asha.verdict(scheduler, rungs, self.state, name, tokens)
            if reason is not None:
                return "stopped", reason
        spent = self.budget_spent()
        return ("unfinished", spent) if spent is not None else None

    def ended(self, name: str, status: str, reason: str = "") -> None:
        """The trial and its processes ended: `done` in order, or `crashed`, or `infeasible`."""
        job = self.running.pop(name)
        verdict = self._verdicts.pop(name, None)
        if status == "done":
            tokens = self.state.trials[name].tokens
            if tokens >= self.sweep.trial.tokens:
                status = "finished"
            elif verdict is not None:
                status, reason = verdict
            elif tokens >= job.stop_at:
                status, reason = "unfinished", "end of the interval"
            else:
                status, reason = "crashed", f"ended at {tokens:,} tokens without a word"
        self.record({"event": "end", "trial": name, "status": status, "reason": reason})

    def budget_spent(self) -> str | None:
        """Which budget is spent, or None."""
        budget, trial, state, now = self.sweep.budget, self.sweep.trial, self.state, self._clock()
        if budget.tokens is not None and state.tokens() >= budget.tokens:
            return f"budget.tokens={budget.tokens} is spent"
        wall = state.wall_seconds + (now - state.session_start if state.session_start is not None else 0.0)
        if budget.wall_minutes is not None and wall >= 60 * budget.wall_minutes:
            return f"budget.wall_minutes={budget.wall_minutes:g} is spent"
        gpu_hours = state.worker_seconds(now) * trial.workers * trial.gpus_per_worker / 3600
        if budget.gpu_hours is not None and gpu_hours >= budget.gpu_hours:
            return f"budget.gpu_hours={budget.gpu_hours:g} is spent"
        return None


def jobs_for(sweep: SweepConfig, seeds: list[int]) -> Jobs:
    """What the config's search and scheduler run."""
    if isinstance(sweep.scheduler, PbtScheduler):
        return PopulationJobs(sweep, seeds[0])
    if sweep.search.method == "optuna":
        from spa_dist.sweep.bayesian import OptunaPoints  # only a sweep that asks for it needs optuna

        return SearchJobs(sweep, seeds, OptunaPoints(sweep))
    return SearchJobs(sweep, seeds, ListedPoints(sweep))
