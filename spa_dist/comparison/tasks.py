"""The two tasks: which cells their tables have, what a run of them is measured by, and how one is run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spa_dist.comparison.jobs import Job, cells_of, in_order
from spa_dist.comparison.variants import VARIANTS, variants_named
from spa_dist.errors import ConfigError

TASKS = ("lm", "recall")
SOME = (
    *("dense", "thin", "random, paper", "random, unbiased", "learned magnitude, paper", "learned magnitude, unbiased"),
    *("learned gumbel, paper", "learned gumbel, unbiased", "adaptive gumbel, paper", "adaptive gumbel, unbiased"),
    *("thin + gate", "random + gate, paper", "random + gate, unbiased", "random, lr ×1, paper"),
)
"""Variants that recall is measured for at other numbers of pairs than the middle one, and at the two smaller d_k′."""


@dataclass(frozen=True)
class Measure:
    """What a table compares."""

    key: str
    """In a result's `final`."""
    name: str
    margin: float
    """Within ± this, two variants count as equal; fixed before any run."""
    unit: str


MEASURES = {
    "lm": Measure("loss", "validation loss", 0.02, "nats per token (2 % of the perplexity)"),
    "recall": Measure("accuracy", "accuracy", 0.01, "of the accuracy (one percentage point)"),
}


def task_settings(task: str, data: Path | None, **changes: Any) -> dict[str, Any]:
    """What decides a run's result besides its job; changes: `steps` and `learning_rate` in place of the task's own.

    Raises:
        ConfigError: language modelling without a dataset.
    """
    if task == "recall":
        from spa_dist.comparison.recall import train

        return train.settings(**changes)
    if data is None:
        raise ConfigError("--task lm needs --data DATASET, made by data_pipeline/prepare.py (see --help)")
    from data_pipeline.dataset import open_dataset
    from spa_dist.comparison import language

    return language.settings(open_dataset(data), **changes)


def task_jobs(task: str, only: str | None, seeds: int) -> list[Job]:
    """Every run of a table, in the order they are made.

    Raises:
        ConfigError: `only` names no variant.
    """
    variants = variants_named(only)
    if not variants:
        raise ConfigError(f"--only {only!r} is part of no variant; there are: {'; '.join(v.name for v in VARIANTS)}")
    if task == "lm":
        from spa_dist.comparison.language import WIDTHS as LM_WIDTHS

        return list(in_order(task, cells_of(variants, LM_WIDTHS, (None,)), seeds))
    from spa_dist.comparison.recall.train import PAIRS, WIDTHS

    middle = PAIRS[1]
    others = tuple(count for count in PAIRS if count != middle)
    some = [variant for variant in variants if variant.name in SOME]
    cells = cells_of(variants, WIDTHS, (middle,)) + cells_of(some, WIDTHS[1:], others)
    return list(in_order(task, cells, seeds))


def run_job(job: Job, settings: dict[str, Any], data: Path | None) -> dict[str, Any]:
    """Train and evaluate one job in this process."""
    if job.task == "recall":
        from spa_dist.comparison.recall import train

        return train.run(job, settings)
    from spa_dist.comparison import language

    assert data is not None
    return language.run(job, settings, data)
