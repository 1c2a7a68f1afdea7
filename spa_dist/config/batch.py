"""Batch arithmetic: global = micro × data-parallel size × accumulation steps, or an error that says how to mend it."""

import math
from dataclasses import dataclass

from spa_dist.config.schema import Config
from spa_dist.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is spread. Sizes are in sequences."""

    global_size: int
    micro_size: int
    accumulation_steps: int
    data_parallel_size: int
    steps: int
    """Optimizer steps of the run."""
    tokens_per_step: int
    """Input positions of one global batch; padding included."""


def plan_batches(config: Config, world_size: int) -> BatchPlan:
    """Spread the global batch over `world_size` processes.

    Raises:
        ConfigError: the sizes do not multiply out.
    """
    tensor = config.parallel.tensor
    if world_size % tensor:
        raise ConfigError(
            f"parallel.tensor={tensor} does not divide the {world_size} started process{'es' * (world_size > 1)}: "
            f"start a multiple of {tensor} (deepspeed --num_accelerators N …), or change parallel.tensor"
        )
    data_parallel = world_size // tensor
    global_size = config.batch.global_size
    if global_size % data_parallel:
        raise ConfigError(
            f"batch.global_size={global_size} is not a multiple of the data-parallel size {data_parallel} "
            f"({world_size} processes / parallel.tensor={tensor}): use {_nearest_multiple(global_size, data_parallel)}"
        )
    share = global_size // data_parallel
    micro = config.batch.micro_size or share
    if share % micro:
        raise ConfigError(
            f"batch.global_size={global_size} / data-parallel size {data_parallel} = {share} sequences per rank, which is not a "
            f"multiple of batch.micro_size={micro}: use a micro size of {_nearest_divisor(share, micro)}, "
            f"or a global size of {_nearest_multiple(global_size, micro * data_parallel)}"
        )
    tokens_per_step = global_size * config.model.sequence_length
    return BatchPlan(global_size, micro, share // micro, data_parallel, total_steps(config), tokens_per_step)


def total_steps(config: Config) -> int:
    """Optimizer steps of the run, the same at every layout."""
    tokens_per_step = config.batch.global_size * config.model.sequence_length
    return config.run.steps or math.ceil((config.run.tokens or 0) / tokens_per_step)


def _nearest_multiple(value: int, base: int) -> int:
    return max(base, round(value / base) * base)


def _nearest_divisor(value: int, near: int) -> int:
    return min((d for d in range(1, value + 1) if value % d == 0), key=lambda d: abs(d - near))
