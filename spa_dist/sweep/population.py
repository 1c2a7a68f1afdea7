"""Population-based training in step (Jaderberg et al., Population Based Training of Neural Networks, 2017).

All members train to the end of an interval; then each of the worst takes over the checkpoint and the values of one of the best, changes
the values a little, and all go on. Members are compared at equal tokens, and what is decided is a pure function of the reports.
"""

import math
import random
from typing import Any

from spa_dist.sweep.jobs import TO_RUN, Donor, Job, ListedPoints, Next, Wait, trial_name
from spa_dist.sweep.ledger import Event
from spa_dist.sweep.schema import PbtScheduler, SpaceKey, SweepConfig
from spa_dist.sweep.space import Values, draw_value
from spa_dist.sweep.state import State, Trial


class PopulationJobs:
    """Members are the points of the search; a job takes one of them through one interval."""

    def __init__(self, sweep: SweepConfig, seed: int):
        assert isinstance(sweep.scheduler, PbtScheduler)
        self._sweep, self._seed, self._scheduler = sweep, seed, sweep.scheduler
        self._source = ListedPoints(sweep)

    def next(self, state: State, running: set[str]) -> Next:
        """Fill the population, then run each member to the end of the interval, then exploit."""
        values = self._source.propose(state)
        if values is not None:
            return {"event": "point", "point": len(state.points), "values": values}
        for point in state.points:
            name = trial_name(point.index, self._seed)
            if point.infeasible is None and name not in state.trials:
                return {"event": "trial", "trial": name, "point": point.index, "seed": self._seed}
        alive = [trial for trial in state.trials.values() if trial.status not in ("crashed", "infeasible")]
        if not alive:
            return Wait() if running else None
        begun = min(trial.tokens for trial in alive)
        return self._within_interval(state, alive, begun, running)

    def _within_interval(self, state: State, alive: list[Trial], begun: int, running: set[str]) -> Next:
        step = self._scheduler.interval_tokens
        start = begun // step * step
        if start >= self._sweep.trial.tokens:
            return Wait() if running else None
        if start and start not in state.settled:
            return Wait() if running else self._next_exchange(state, alive, start)
        for trial in alive:
            if trial.name not in running and trial.tokens < start + step and trial.status in TO_RUN:
                return Job(trial.name, start + step, _donor_at(state, trial, start))
        return Wait() if running else None

    def _next_exchange(self, state: State, alive: list[Trial], tokens: int) -> Event:
        """The first exchange at the end of an interval that is not recorded yet, or the record that there are no more."""
        count = max(1, math.floor(self._scheduler.quantile * len(alive))) if len(alive) > 1 else 0
        ranked = sorted(alive, key=lambda trial: (trial.loss_at(tokens), trial.name))
        done = {event["trial"] for event in state.exploits if event["tokens"] == tokens}
        for trial in ranked[len(ranked) - count :]:
            if trial.name not in done:
                rng = random.Random(f"{self._scheduler.seed}/{tokens}/{trial.name}")
                donor = rng.choice(ranked[:count])
                values = self._explore(state.points[donor.point].values, rng)
                return {
                    "event": "exploit", "tokens": tokens, "trial": trial.name, "point": trial.point, "donor": donor.name,
                    "loss": trial.loss_at(tokens), "donor_loss": donor.loss_at(tokens),
                    "before": state.points[trial.point].values, "values": values,
                }  # fmt: skip
        return {"event": "settled", "tokens": tokens}

    def _explore(self, values: Values, rng: random.Random) -> Values:
        explored: Values = {}
        for key, value in values.items():
            domain = self._sweep.space[key]
            fresh = rng.random() < self._scheduler.resample
            explored[key] = draw_value(domain, rng) if fresh else _perturbed(domain, value, self._scheduler.factors, rng)
        return explored


def _donor_at(state: State, trial: Trial, tokens: int) -> Donor | None:
    """Whose checkpoint the trial takes over at the start of the interval that it now runs."""
    for event in state.exploits:
        if event["trial"] == trial.name and event["tokens"] == tokens:
            return Donor(event["donor"], tokens)
    return None


def _perturbed(domain: SpaceKey, value: Any, factors: tuple[float, float], rng: random.Random) -> Any:
    """A number times one of the factors, within the domain; from a list, a neighbour."""
    if domain.bounds is not None:
        low, high = domain.bounds
        moved = value * rng.choice(factors)
        return min(max(round(moved) if isinstance(low, int) and isinstance(high, int) else moved, low), high)
    assert domain.values
    place = domain.values.index(value) + rng.choice((-1, 1))
    return domain.values[min(max(place, 0), len(domain.values) - 1)]
