"""Which trial comes next: every point with every seed. A pure function of the state, so that a resumed sweep goes on where it was."""

from dataclasses import dataclass
from typing import Protocol

from spa_dist.sweep.ledger import Event
from spa_dist.sweep.schema import GridSearch, RandomSearch, SweepConfig
from spa_dist.sweep.space import Values, combinations, draw
from spa_dist.sweep.state import State

TO_RUN = ("waiting", "unfinished")


@dataclass(frozen=True)
class Donor:
    """Whose checkpoint a trial takes over before it goes on."""

    trial: str
    tokens: int


@dataclass(frozen=True)
class Job:
    """A trial to run up to `stop_at` tokens."""

    trial: str
    stop_at: int
    donor: Donor | None = None


class Wait:
    """Nothing can start before something that runs has ended."""


Next = Job | Event | Wait | None
"""A job, an event to record before asking again, wait, or None: the sweep has no more to do."""


class Jobs(Protocol):
    """What a search or a population offers."""

    def next(self, state: State, running: set[str]) -> Next:
        """What comes next, with these trials running."""


def trial_name(point: int, seed: int) -> str:
    """The name of a trial, and of its folder."""
    return f"p{point:04d}-s{seed}"


class SearchJobs:
    """Points one after another, each with all of its seeds."""

    def __init__(self, sweep: SweepConfig, seeds: list[int], source: "PointSource"):
        self._sweep, self._seeds, self._source = sweep, seeds, source

    def next(self, state: State, running: set[str]) -> Next:
        """The first trial that has not ended, or a new point."""
        for trial in state.trials.values():
            if trial.name not in running and trial.status in TO_RUN:
                if _fallen(state, trial.point):
                    return {"event": "end", "trial": trial.name, "status": "stopped", "reason": "its point was stopped"}
                return Job(trial.name, self._sweep.trial.tokens)
        for point in state.points:
            if point.infeasible is None and not _fallen(state, point.index):
                for seed in self._seeds:
                    if trial_name(point.index, seed) not in state.trials:
                        return self._new_trial(state, point.index, seed, running)
        values = self._source.propose(state)
        if values is not None:
            return {"event": "point", "point": len(state.points), "values": values}
        return Wait() if running else None

    def _new_trial(self, state: State, point: int, seed: int, running: set[str]) -> Next:
        most = self._sweep.budget.trials
        if most is not None and len(state.trials) >= most:
            return Wait() if running else None
        return {"event": "trial", "trial": trial_name(point, seed), "point": point, "seed": seed}


def _fallen(state: State, point: int) -> bool:
    """Whether the scheduler stopped a seed of the point: the others will not be ranked, and need not train."""
    return any(trial.status == "stopped" for trial in state.of_point(point))


class PointSource(Protocol):
    """Where points come from."""

    def propose(self, state: State) -> Values | None:
        """The next point, or None when there are no more."""


class ListedPoints:
    """Grid and random search: the point of an index is a pure function of the config."""

    def __init__(self, sweep: SweepConfig):
        self._sweep = sweep
        self._grid = combinations(sweep.space)

    def propose(self, state: State) -> Values | None:
        """The point that follows those of the state."""
        index, search = len(state.points), self._sweep.search
        if isinstance(search, GridSearch):
            return self._grid[index] if index < len(self._grid) else None
        assert isinstance(search, RandomSearch)
        if index >= search.points * len(self._grid):
            return None
        return draw(self._sweep.space, search.seed, index, self._grid[index % len(self._grid)])
