"""From a file and `--set key=value` to a checked sweep; every mistake is one line, found before Ray starts."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from spa_dist.config import apply_override
from spa_dist.config.load import find_config, read_json, unknown_keys
from spa_dist.config.midrun import MID_RUN_KEYS
from spa_dist.errors import ConfigError
from spa_dist.sweep.schema import PbtScheduler, SweepConfig
from spa_dist.sweep.space import combinations, ordered


def load_sweep(name: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep config, apply overrides, and check what it alone can decide.

    Raises:
        ConfigError: one line naming the file or the dotted key, and the way out.
    """
    tree = read_json(find_config(name))
    for override in overrides:
        section, _, rest = override.partition(".")
        key, separator, value = rest.partition("=")
        if section in ("set", "space") and separator:  # their keys are dotted themselves
            node = tree.setdefault(section, {})
            inner: dict = {}
            apply_override(inner, f"value={value}")
            node[key] = inner["value"]
        else:
            apply_override(tree, override)
    unknown = next(unknown_keys(tree, SweepConfig), None)
    if unknown is not None:
        raise ConfigError(unknown)
    try:
        sweep = SweepConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    check_sweep(sweep)
    return sweep


def check_sweep(sweep: SweepConfig) -> None:
    """Raise `ConfigError` for the first rule between keys that the sweep breaks."""
    ordered(sweep.space)
    for key in sweep.space:
        if key in sweep.set:
            raise ConfigError(f"set.{key}: the space varies it; remove one of the two")
    _check_search(sweep)
    _check_trial(sweep)
    if isinstance(sweep.scheduler, PbtScheduler):
        _check_population(sweep, sweep.scheduler)


def _check_search(sweep: SweepConfig) -> None:
    method = sweep.search.method
    for key, domain in sweep.space.items():
        if method == "grid" and domain.grid is None:
            raise ConfigError(f"space.{key}: search.method=grid tries lists; write a grid, or use random or optuna")
        if method == "optuna" and domain.grid is not None:
            raise ConfigError(f"space.{key}: search.method=optuna draws; write choice instead of grid")
    if method == "grid" and not combinations(sweep.space):
        raise ConfigError("space: the grid has no point")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise ConfigError(f"seeds {sweep.seeds}: each seed once")
    if len(set(sweep.objectives)) < len(sweep.objectives):
        raise ConfigError(f"objectives {sweep.objectives}: each objective once")


def _check_trial(sweep: SweepConfig) -> None:
    trial, budget = sweep.trial, sweep.budget
    if trial.tokens % trial.report_tokens:
        raise ConfigError(f"trial.report_tokens={trial.report_tokens} does not divide trial.tokens={trial.tokens}")
    if 0 < trial.gpus_per_worker < 1 and trial.workers > 1:
        raise ConfigError(
            f"trial.gpus_per_worker={trial.gpus_per_worker} with {trial.workers} workers: NCCL takes one process per GPU; "
            "a share of a GPU is for trials of one worker"
        )
    if budget.gpu_hours is not None and not trial.gpus_per_worker:
        raise ConfigError(
            "budget.gpu_hours: trial.gpus_per_worker is 0, so no GPU-hour is ever spent; use budget.wall_minutes"
        )
    if sweep.cluster.address is None and sum(node.count for node in sweep.cluster.nodes) > 1:
        raise ConfigError(
            "cluster.nodes has several nodes, and without cluster.address the sweep starts Ray on this one alone"
        )


def _check_population(sweep: SweepConfig, scheduler: PbtScheduler) -> None:
    for key in sweep.space:
        if key not in MID_RUN_KEYS:
            raise ConfigError(
                f"space.{key}: scheduler pbt hands weights from member to member, so it can vary only what may change in the middle "
                f"of a run: {', '.join(MID_RUN_KEYS)}"
            )
    if sweep.search.method == "optuna":
        raise ConfigError("search.method=optuna: scheduler pbt moves the points itself; use random or grid")
    if len(sweep.seeds) > 1:
        raise ConfigError(f"seeds {sweep.seeds}: members of a population share one seed, so that weights can change hands")
    for key in ("tokens", "interval_tokens"):
        value = sweep.trial.tokens if key == "tokens" else scheduler.interval_tokens
        step = scheduler.interval_tokens if key == "tokens" else sweep.trial.report_tokens
        if value % step:
            raise ConfigError(
                f"scheduler.interval_tokens={scheduler.interval_tokens} must be a multiple of trial.report_tokens="
                f"{sweep.trial.report_tokens} and divide trial.tokens={sweep.trial.tokens}"
            )


def _describe(error: ValidationError) -> str:
    """The first mistake of a pydantic report in one line, with its dotted key."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if len(place) > 2 and place[0] in ("search", "scheduler"):
        del place[1]  # pydantic names the variant that it chose
    key = ".".join(place)
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if first["type"] == "missing":
        return f"{key} is missing: every sweep needs it"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}; remove it"
    if first["type"] in ("too_short", "too_long"):
        return f"{key} is empty: {message}"
    if first["type"] in ("value_error", "union_tag_invalid", "union_tag_not_found"):
        return f"{key}: {message}"
    return f"{key}: {message}, not {first.get('input')!r}"
