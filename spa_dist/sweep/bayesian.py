"""Points from Optuna's TPE, on the mean over seeds. The only importer of optuna.

The study is built from the state for each proposal: nothing of Optuna's is to be saved, and a resumed sweep proposes what an
unbroken one would.
"""

from typing import Any

import optuna

from spa_dist.sweep.results import point_metrics
from spa_dist.sweep.schema import MAXIMISED, OptunaSearch, SweepConfig
from spa_dist.sweep.space import Space, Values, is_integer, suggest
from spa_dist.sweep.state import Point, State

optuna.logging.set_verbosity(optuna.logging.WARNING)


class OptunaPoints:
    """Proposes the next point after those of the state."""

    def __init__(self, sweep: SweepConfig):
        assert isinstance(sweep.search, OptunaSearch)
        self._sweep, self._search = sweep, sweep.search

    def propose(self, state: State) -> Values | None:
        """Ask a study that has seen every point so far; points that still run count as poor, so that others are tried."""
        if len(state.points) >= self._search.points:
            return None
        sampler = optuna.samplers.TPESampler(
            seed=hash_of(self._search.seed, len(state.points)),
            n_startup_trials=self._search.startup_points,
            constant_liar=True,
        )
        direction = optuna.study.StudyDirection
        directions = [direction.MAXIMIZE if name in MAXIMISED else direction.MINIMIZE for name in self._sweep.objectives]
        study = optuna.create_study(directions=directions, sampler=sampler)
        study.add_trials([self._trial(state, point) for point in state.points])
        return suggest(self._sweep.space, study.ask())

    def _trial(self, state: State, point: Point) -> optuna.trial.FrozenTrial:
        space = self._sweep.space
        params = {key: _as_param(space, key, value) for key, value in point.values.items()}
        known: dict[str, Any] = {"params": params, "distributions": {key: _distribution(space, key) for key in params}}
        trials = state.of_point(point.index)
        states = optuna.trial.TrialState
        if point.infeasible is not None or any(trial.status == "crashed" for trial in trials):
            return optuna.trial.create_trial(state=states.FAIL, **known)
        metrics = point_metrics(state, point, self._sweep)
        if metrics is not None:
            values = [value for value in (metrics[name] for name in self._sweep.objectives) if value is not None]
            if len(values) < len(self._sweep.objectives):  # a loss that was not finite
                return optuna.trial.create_trial(state=states.FAIL, **known)
            return optuna.trial.create_trial(values=values, **known)
        if any(trial.status == "stopped" for trial in trials):
            best = min(trials, key=lambda trial: -trial.tokens)
            seen = {tokens: best.loss_at(tokens) for tokens in best.reports}
            return optuna.trial.create_trial(state=states.PRUNED, intermediate_values=seen, **known)
        return optuna.trial.create_trial(state=states.RUNNING, **known)


def hash_of(seed: int, number: int) -> int:
    """A seed for each proposal, within what Optuna takes."""
    return (seed * 1_000_003 + number * 7_919) % 2**32


def _as_param(space: Space, key: str, value: Any) -> Any:
    listed = space[key].values
    return value if listed is None else listed.index(value)


def _distribution(space: Space, key: str) -> optuna.distributions.BaseDistribution:
    domain = space[key]
    if domain.bounds is None:
        assert domain.values
        return optuna.distributions.CategoricalDistribution(list(range(len(domain.values))))
    low, high = domain.bounds
    log = domain.log_uniform is not None
    if is_integer(domain):
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    return optuna.distributions.FloatDistribution(float(low), float(high), log=log)
