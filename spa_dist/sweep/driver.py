"""Run a sweep: check it, start or join Ray, let Tune run the trials, write what came of them."""

import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.tune

from spa_dist.cli import EXIT_INTERRUPTED, EXIT_OK
from spa_dist.errors import ConfigError, DataError
from spa_dist.sweep.control import Control, jobs_for
from spa_dist.sweep.ledger import Ledger, read_events
from spa_dist.sweep.live import Display
from spa_dist.sweep.mailbox import start_mailbox
from spa_dist.sweep.plots import write_plots
from spa_dist.sweep.points import Points
from spa_dist.sweep.resources import Node, trials_at_a_time
from spa_dist.sweep.results import Row, write_results, write_whole
from spa_dist.sweep.schema import GridSearch, SweepConfig
from spa_dist.sweep.space import combinations
from spa_dist.sweep.state import State
from spa_dist.sweep.trial import run_trial
from spa_dist.sweep.tuning import JobSearcher, ReportListener, SpecBuilder, TrialWatcher

EVENTS = "events.jsonl"
MAY_CHANGE = {"budget", "cluster"}
"""Sections of the sweep config that `--resume` takes anew."""
RAY_SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # seconds between two looks at the workers, and so the delay of a report
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
}
OBJECT_STORE_BYTES = 100 * 2**20


def plan_sweep(sweep: SweepConfig) -> tuple[Points, int | None]:
    """Everything that can be found wrong before Ray starts; returns the points' builder and, where it is known, how many trials fit.

    Raises:
        ConfigError: a key, a value, an empty space, or a trial that cannot fit.
    """
    points = Points(sweep)
    if isinstance(sweep.search, GridSearch):
        reasons = [points.examine(values)["infeasible"] for values in combinations(sweep.space)]
        if all(reasons):
            raise ConfigError(f"space: not one of its {len(reasons)} points can be trained; the first: {reasons[0]}")
    nodes = declared_nodes(sweep)
    return points, trials_at_a_time(nodes, sweep.trial) if nodes else None


def declared_nodes(sweep: SweepConfig) -> list[Node]:
    """The nodes that the config counts on; this machine where it names none; empty for a cluster that has yet to be asked."""
    named = [Node(kind.cpus, kind.gpus) for kind in sweep.cluster.nodes for _ in range(kind.count)]
    if named or sweep.cluster.address is not None:
        return named
    import torch

    return [Node(os.cpu_count() or 1, torch.cuda.device_count())]


def describe_sweep(sweep: SweepConfig) -> str:
    """What would run."""
    points, slots = plan_sweep(sweep)
    grid = isinstance(sweep.search, GridSearch)
    count = len(combinations(sweep.space)) * (1 if grid else sweep.search.points)  # type: ignore[union-attr]
    lines = [
        f"sweep        {sweep.name} → {sweep.sweep_dir}",
        f"points       {count} by {sweep.search.method} over {', '.join(sweep.space)}",
        f"trials       {count * len(points.seeds)}: seeds {points.seeds}, {sweep.trial.tokens:,} tokens each",
        f"scheduler    {sweep.scheduler.name}",
        f"a trial      {sweep.trial.workers} workers × ({sweep.trial.cpus_per_worker:g} CPU, {sweep.trial.gpus_per_worker:g} GPU)",
        f"at a time    {slots if slots is not None else 'as many as the cluster holds'}",
    ]
    if grid:
        for values in combinations(sweep.space):
            lines.append(f"  {json.dumps(values)}{_why(points.examine(values)['infeasible'])}")
    return "\n".join(lines)


def _why(reason: str | None) -> str:
    return f"  infeasible: {reason}" if reason else ""


def run_sweep(sweep: SweepConfig, *, resume: bool) -> tuple[int, list[Row]]:
    """Run a sweep to its end or to its budget's; returns the exit code and the final table.

    Raises:
        ConfigError: the sweep cannot run, or its folder holds another one.
    """
    points, slots = plan_sweep(sweep)
    folder = Path(sweep.sweep_dir).absolute()
    check_folder(sweep, folder, resume)
    ledger = Ledger(folder / EVENTS)
    try:
        write_whole(folder / "sweep.json", json.dumps(sweep.model_dump(mode="json"), indent=2) + "\n")
        state = State()
        for event in read_events(folder / EVENTS):
            state.apply(event)
        with _ray(sweep):
            slots = trials_at_a_time(_live_nodes(), sweep.trial)
            most = sweep.cluster.max_concurrent
            control = Control(
                sweep, points, ledger, state, jobs_for(sweep, points.seeds), min(slots, most) if most else slots
            )
            control.record({"event": "session"})
            _tune(control, folder)
        table = write_results(state, sweep, folder)
        write_plots(table, state, sweep, folder)
        return (EXIT_INTERRUPTED if _unfinished(state) else EXIT_OK), table
    finally:
        ledger.close()


def _unfinished(state: State) -> bool:
    return any(trial.status in ("unfinished", "waiting", "running") for trial in state.trials.values())


def check_folder(sweep: SweepConfig, folder: Path, resume: bool) -> None:
    """Raise `ConfigError` when the folder holds a sweep and is not to be resumed, or holds none or another one and is."""
    begun = (folder / EVENTS).exists()
    if begun and not resume:
        raise ConfigError(f"{folder} already holds a sweep: go on with it by --resume, or set another dir or name")
    if resume and not begun:
        raise ConfigError(f"{folder} holds no sweep to resume: leave --resume out to start one")
    if not begun:
        return
    try:
        saved = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'sweep.json'} cannot be read: {error}") from None
    now = sweep.model_dump(mode="json")
    for key, value in now.items():
        if key not in MAY_CHANGE and saved.get(key) != value:
            raise ConfigError(
                f"{key} is not what the sweep in {folder} was started with: restore it, or set another dir; only "
                f"{' and '.join(sorted(MAY_CHANGE))} may change"
            )


@contextmanager
def _ray(sweep: SweepConfig) -> Iterator[None]:
    """A Ray of our own for the length of the sweep, or the one at the address."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": {name: os.environ[name] for name in RAY_SETTINGS}},
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # it misses result files that events.jsonl stands for
    cluster = sweep.cluster
    if cluster.address is not None:
        try:
            ray.init(address=cluster.address, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"cluster.address={cluster.address}: no Ray cluster can be joined there ({reason})") from None
    else:
        node = declared_nodes(sweep)[0]
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", num_cpus=int(node.cpus), num_gpus=int(node.gpus), **own, **settings)
    try:
        yield
    finally:
        ray.shutdown()


def _live_nodes() -> list[Node]:
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in found]


def _tune(control: Control, folder: Path) -> None:
    """Let Tune run what `control` gives, until it gives no more."""
    name = f"spa-sweep-{uuid.uuid4().hex[:12]}"
    mailbox = start_mailbox(name)

    def on_change() -> None:
        write_results(control.state, control.sweep, folder)

    at_head = ray.tune.PlacementGroupFactory([{"CPU": 0, "node:__internal_head__": 0.001}])
    with Display(control, on_change) as display:
        ray.tune.Tuner(
            ray.tune.with_resources(run_trial, at_head),
            tune_config=ray.tune.TuneConfig(
                search_alg=JobSearcher(control, SpecBuilder(control, name)),
                scheduler=ReportListener(control, mailbox),
                num_samples=-1,
                trial_name_creator=lambda trial: trial.config["trial"],
                trial_dirname_creator=lambda trial: f"{trial.config['trial']}-{trial.trial_id}",
            ),
            run_config=ray.tune.RunConfig(
                name=name, storage_path=str(folder / "ray"), callbacks=[TrialWatcher(control, display)], verbose=0
            ),
        ).fit()
