"""Pictures of a sweep: Pareto fronts, parallel coordinates, and TensorBoard's HParams."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spa_dist.sweep.results import Row, pareto_front
from spa_dist.sweep.schema import SweepConfig
from spa_dist.sweep.state import State

COSTS = {
    "tokens_per_second": "measured tokens per second",
    "flops_per_token": "training FLOPs per token",
    "cache_bytes_per_token": "cache bytes per token",
}


def write_plots(table: Sequence[Row], state: State, sweep: SweepConfig, folder: Path) -> None:
    """pareto.png, parallel.png and tensorboard/ for the points that have finished; nothing where there are none."""
    finished = [row for row in table if row.status == "finished" and row.metrics["validation_loss"] is not None]
    if not finished:
        return
    import matplotlib

    matplotlib.use("Agg")
    _pareto(finished, folder / "pareto.png")
    _parallel(finished, sweep, folder / "parallel.png")
    _hparams(state, folder / "tensorboard")


def _pareto(finished: Sequence[Row], path: Path) -> None:
    """Validation loss against each cost, and the front in it."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(COSTS), figsize=(15, 4.5), layout="constrained", sharey=True)
    metrics = [row.metrics for row in finished]
    for axes, (cost, label) in zip(panels, COSTS.items()):
        places = [place for place, entry in enumerate(metrics) if entry[cost] is not None]
        shown: list[tuple[float, float]] = [(metrics[p][cost], metrics[p]["validation_loss"]) for p in places]  # type: ignore[misc]
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if not shown:
            continue
        errors = [finished[place].loss_deviation or 0.0 for place in places]
        axes.errorbar(*zip(*shown), yerr=errors, fmt="o", markersize=5, linewidth=1, alpha=0.7)
        for place, (x, y) in zip(places, shown):
            text = " ".join(str(value) for value in finished[place].values.values())
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        front = sorted(
            (metrics[p][cost], metrics[p]["validation_loss"]) for p in pareto_front(metrics, ["validation_loss", cost])
        )
        axes.plot(*zip(*front), "-", color="tab:red", linewidth=1, label="Pareto front")
        axes.legend()
    panels[0].set_ylabel("validation loss (nats per token)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parallel(finished: Sequence[Row], sweep: SweepConfig, path: Path) -> None:
    """A vertical axis per key and per metric, a line per point, coloured by validation loss."""
    from matplotlib import colormaps, pyplot

    names = [*sweep.space, "validation_loss", *COSTS]
    columns = [[row.values.get(name, row.metrics.get(name)) for row in finished] for name in names]
    scaled = [_to_unit(column) for column in columns]
    figure, axes = pyplot.subplots(figsize=(2.2 * len(names), 5), layout="constrained")
    loss = scaled[names.index("validation_loss")]
    for place in range(len(finished)):
        heights = [column[0][place] for column in scaled]
        axes.plot(range(len(names)), heights, color=colormaps["viridis"](1.0 - loss[0][place]), alpha=0.8)
    for position, (_, ticks) in enumerate(scaled):
        axes.axvline(position, color="black", linewidth=0.6)
        for height, text in ticks:
            axes.annotate(text, (position, height), textcoords="offset points", xytext=(3, 0), fontsize=7)
    axes.set_xticks(range(len(names)), [name.replace(".", ".\n").replace("_", " ") for name in names], fontsize=8)
    axes.set_yticks([])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _to_unit(column: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights in [0, 1] and the ticks of one axis: numbers by size, anything else by place in a sorted list."""
    numbers = [value for value in column if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(column):
        low, high = min(numbers), max(numbers)
        heights = [(value - low) / (high - low) if high > low else 0.5 for value in numbers]
        return heights, [(0.0 if high > low else 0.5, f"{low:.4g}"), *([(1.0, f"{high:.4g}")] if high > low else [])]
    labels = sorted({str(value) for value in column})
    place = {label: index / max(1, len(labels) - 1) for index, label in enumerate(labels)}
    return [place[str(value)] for value in column], [(height, label) for label, height in place.items()]


def _hparams(state: State, folder: Path) -> None:
    """One HParams entry per trial that reported."""
    from torch.utils.tensorboard import SummaryWriter

    for trial in state.trials.values():
        own = folder / trial.name
        if not trial.reports or trial.status == "running" or own.exists():
            continue
        last = trial.reports[trial.tokens]
        values = {
            key: value if isinstance(value, int | float | str | bool) else str(value)
            for key, value in state.points[trial.point].values.items()
        }
        metrics = {f"sweep/{key}": float(value) for key, value in last.items() if isinstance(value, int | float)}
        with SummaryWriter(str(own)) as writer:
            writer.add_hparams(values | {"seed": trial.seed}, metrics, run_name=".")
