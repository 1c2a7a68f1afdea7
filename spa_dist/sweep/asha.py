"""Asynchronous successive halving over tokens (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020).

A pure function of the reports, so that nothing is to be saved: at a rung, a trial is measured against those whose report at exactly
these tokens came before its own. What counts is the mean over those of a point's seeds that have got there, and a point falls with all
of its seeds. A point whose sparsity warm-up is not over at a rung has not shown what it is: it passes, and is not counted there.
"""

import math
from collections.abc import Mapping

from spa_dist.sweep.schema import AshaScheduler, TrialConfig
from spa_dist.sweep.state import State


def rungs(scheduler: AshaScheduler, trial: TrialConfig) -> list[int]:
    """Tokens of the rungs below a full trial, each a multiple of the report interval: first, first · reduction, …"""
    every = trial.report_tokens
    first = math.ceil((scheduler.first_tokens or every) / every) * every
    found = []
    while first < trial.tokens:
        found.append(first)
        first *= scheduler.reduction
    return found


def verdict(scheduler: AshaScheduler, rung_tokens: list[int], state: State, name: str, tokens: int) -> str | None:
    """Why the trial that reports at `tokens` must stop, or None."""
    point = state.trials[name].point
    for other in state.of_point(point):
        if other.name != name and other.status == "stopped" and tokens >= other.tokens:
            return f"its point was stopped at {other.tokens:,} tokens (seed {other.seed})"
    if tokens not in rung_tokens or tokens < state.points[point].warmup_tokens:
        return None
    means = _means_up_to(state, name, tokens)
    kept = math.ceil(len(means) / scheduler.reduction)
    better = sum(mean < means[point] for mean in means.values())
    if better < kept:
        return None
    return f"rung {tokens:,} tokens: validation loss {means[point]:.4f} is place {better + 1} of {len(means)}, {kept} go on"


def _means_up_to(state: State, name: str, tokens: int) -> Mapping[int, float]:
    """Point → mean loss at the rung, over the reports up to and including this trial's."""
    losses: dict[int, list[float]] = {}
    for other in state.first_reports[tokens]:
        trial = state.trials[other]
        if tokens >= state.points[trial.point].warmup_tokens:
            losses.setdefault(trial.point, []).append(trial.loss_at(tokens))
        if other == name:
            break
    return {point: sum(values) / len(values) for point, values in losses.items()}
