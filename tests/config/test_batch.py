"""Batch arithmetic: what an error suggests is a size that works."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.config import Config, config_from_dict, plan_batches
from spa_dist.errors import ConfigError

SUGGESTED = r"use (\d+)$|use a micro size of (\d+), or a global size of (\d+)$"


def config_with(global_size: int, micro_size: int | None, tensor: int = 1, run: dict[str, int] | None = None) -> Config:
    """A config of these sizes."""
    return config_from_dict(
        {
            "run": run or {"steps": 7},
            "model": {"sequence_length": 16},
            "batch": {"global_size": global_size, "micro_size": micro_size},
            "parallel": {"tensor": tensor},
        }
    )


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 200), st.integers(1, 40) | st.none(), st.sampled_from([1, 2, 4]), st.integers(1, 9))
def test_suggested_sizes_work(global_size: int, micro_size: int | None, tensor: int, data: int) -> None:
    """An error names sizes; with each of them alone the same mistake is gone, and at most the other size is left to mend."""
    for _ in range(3):
        try:
            plan = plan_batches(config_with(global_size, micro_size, tensor), tensor * data)
        except ConfigError as error:
            numbers = re.search(SUGGESTED, str(error))
            assert numbers, error
            multiple, micro, larger = (int(number) if number else None for number in numbers.groups())
            if multiple is None:
                assert micro and larger
                plan_batches(config_with(global_size, micro, tensor), tensor * data)
                plan_batches(config_with(larger, micro_size, tensor), tensor * data)
                return
            assert multiple % data == 0 and abs(multiple - global_size) < data
            global_size = multiple
        else:
            assert plan.micro_size * plan.data_parallel_size * plan.accumulation_steps == global_size == plan.global_size
            assert plan.data_parallel_size == data and plan.micro_size == (micro_size or global_size // data)
            return
    pytest.fail("suggestions go round in circles")


def test_processes_must_fill_whole_tensor_groups() -> None:
    """Seven processes are not groups of two."""
    with pytest.raises(
        ConfigError, match=r"^parallel\.tensor=2 does not divide the 7 started processes: start a multiple of 2"
    ):
        plan_batches(config_with(8, None, tensor=2), 7)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 10_000), st.integers(1, 8))
def test_a_length_in_tokens_is_rounded_up_to_whole_steps(tokens: int, global_size: int) -> None:
    """The last step passes the asked tokens, the one before it does not."""
    plan = plan_batches(config_with(global_size, None, run={"tokens": tokens}), 1)
    assert (plan.steps - 1) * plan.tokens_per_step < tokens <= plan.steps * plan.tokens_per_step
    assert plan.tokens_per_step == 16 * global_size
