"""What came of the points: means over seeds, ranking, Pareto front, and the files that say so."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spa_dist.sweep.schema import MAXIMISED, SweepConfig
from spa_dist.sweep.space import Values
from spa_dist.sweep.state import Point, State, Trial

METRICS = ("validation_loss", "tokens_per_second", "flops_per_token", "cache_bytes_per_token", "parameters")
ORDER = ("finished", "running", "stopped", "unfinished", "waiting", "crashed", "infeasible")


@dataclass(frozen=True)
class Row:
    """One point of the final table."""

    point: int
    values: Values
    status: str
    """Of the point: `finished` when all of its seeds are."""
    tokens: int
    """The last report that all of its trials made that made any."""
    metrics: dict[str, float | None]
    """Means over the seeds at `tokens`."""
    loss_deviation: float | None
    """Sample standard deviation of the validation loss over the seeds; None with fewer than two."""
    seeds: int
    """Seeds that reported."""
    reason: str
    front: bool = False
    """No finished point is better in one objective and no worse in the others."""


def point_metrics(state: State, point: Point, sweep: SweepConfig) -> dict[str, float | None] | None:
    """Means over the seeds of a finished point; None before all of them have finished."""
    trials = state.of_point(point.index)
    complete = len(trials) == max(1, len(sweep.seeds)) and all(trial.status == "finished" for trial in trials)
    return _means(trials, sweep.trial.tokens) if complete else None


def _means(trials: Sequence[Trial], tokens: int) -> dict[str, float | None]:
    return {name: _mean([trial.reports[tokens].get(name) for trial in trials]) for name in METRICS}


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of finite numbers; None when one of them is missing or not finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite and len(finite) == len(values) else None


def rows(state: State, sweep: SweepConfig) -> list[Row]:
    """All points, best first: finished ones by the first objective, then those that got further, then the rest."""
    table = [_row(state, point, sweep) for point in state.points]
    front = pareto_front([row.metrics for row in table if row.status == "finished"], sweep.objectives)
    best = [row for row in table if row.status == "finished"]
    members = {id(best[place]) for place in front}
    table = [Row(**{**vars(row), "front": id(row) in members}) for row in table]
    objective = sweep.objectives[0]
    return sorted(table, key=lambda row: (ORDER.index(row.status), *_rank(row, objective), row.point))


def _rank(row: Row, objective: str) -> tuple[float, float]:
    value = row.metrics.get(objective)
    if value is None:
        return -row.tokens, math.inf
    return -row.tokens, -value if objective in MAXIMISED else value


def _row(state: State, point: Point, sweep: SweepConfig) -> Row:
    trials = state.of_point(point.index)
    status = _status(point, trials, max(1, len(sweep.seeds)))
    heard = [trial for trial in trials if trial.reports]
    common = set.intersection(*(set(trial.reports) for trial in heard)) if heard else set()
    tokens = max(common, default=0)
    losses = [trial.loss_at(tokens) for trial in heard] if common else []
    finite = [loss for loss in losses if math.isfinite(loss)]
    reason = point.infeasible or "; ".join(dict.fromkeys(trial.reason for trial in trials if trial.reason))
    return Row(
        point=point.index,
        values=point.values,
        status=status,
        tokens=tokens,
        metrics=_means(heard, tokens) if common else dict.fromkeys(METRICS),
        loss_deviation=statistics.stdev(finite) if len(finite) == len(losses) > 1 else None,
        seeds=len(heard),
        reason=reason,
    )


def _status(point: Point, trials: Sequence[Trial], seeds: int) -> str:
    if point.infeasible is not None:
        return "infeasible"
    found = {trial.status for trial in trials}
    for status in ("infeasible", "crashed", "stopped", "running"):
        if status in found:
            return status
    return "finished" if found == {"finished"} and len(trials) == seeds else "unfinished" if found else "waiting"


def pareto_front(metrics: Sequence[dict[str, float | None]], objectives: Sequence[str]) -> list[int]:
    """Places of those that no other dominates: at least as good in each objective, better in one. Incomplete ones never count."""

    def costs(entry: dict[str, float | None]) -> list[float] | None:
        found: list[float] = []
        for name in objectives:
            value = entry.get(name)
            if value is None:
                return None
            found.append(-value if name in MAXIMISED else value)
        return found

    points = [costs(entry) for entry in metrics]

    def dominated(own: list[float]) -> bool:
        return any(
            other is not None and all(a <= b for a, b in zip(other, own)) and any(a < b for a, b in zip(other, own))
            for other in points
        )

    return [place for place, own in enumerate(points) if own is not None and not dominated(own)]


def result_lines(state: State) -> list[dict[str, Any]]:
    """One line per trial that has ended: what it was, how it ended, and its last report."""
    lines = []
    for trial in state.trials.values():
        if trial.status not in ("waiting", "running"):
            lines.append(
                {
                    "trial": trial.name, "point": trial.point, "seed": trial.seed, "values": state.points[trial.point].values,
                    "status": trial.status, "reason": trial.reason, "tokens": trial.tokens, "attempts": trial.attempts,
                    "seconds": trial.seconds, **trial.reports.get(trial.tokens, {}),
                }
            )  # fmt: skip
    for point in state.points:
        if point.infeasible is not None:
            lines.append(
                {
                    "point": point.index,
                    "values": point.values,
                    "status": "infeasible",
                    "reason": point.infeasible,
                    "tokens": 0,
                }
            )
    return lines


def best_config(table: Sequence[Row], state: State, sweep: SweepConfig, sweep_dir: Path) -> dict[str, Any] | None:
    """A complete run config of the best finished point, with where it comes from; None before a point has finished."""
    finished = [row for row in table if row.status == "finished" and row.metrics[sweep.objectives[0]] is not None]
    if not finished:
        return None
    row = finished[0]
    trial = state.of_point(row.point)[0]
    config = json.loads((sweep_dir / "trials" / trial.name / "config.json").read_text(encoding="utf-8"))
    name = f"{sweep.name}-best"
    config["run"] |= {"name": name, "dir": f"runs/{name}"}
    config["logging"]["progress"] = True
    config["provenance"] = {
        "sweep": sweep.name,
        "sweep_config": sweep.model_dump(mode="json"),
        "point": row.point,
        "values": row.values,
        "trials": [each.name for each in state.of_point(row.point)],
        "workers": sweep.trial.workers,
        "metrics": row.metrics,
        "validation_loss_deviation": row.loss_deviation,
        "points_compared": len(finished),
    }
    exchanges = [event for event in state.exploits if event["trial"] == trial.name]
    if exchanges:
        config["provenance"]["exploits"] = exchanges
    return config


def write_results(state: State, sweep: SweepConfig, sweep_dir: Path) -> list[Row]:
    """Write results.jsonl and best.json; returns the table."""
    table = rows(state, sweep)
    write_whole(sweep_dir / "results.jsonl", "".join(json.dumps(line) + "\n" for line in result_lines(state)))
    best = best_config(table, state, sweep, sweep_dir)
    if best is not None:
        write_whole(sweep_dir / "best.json", json.dumps(best, indent=2) + "\n")
    return table


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
