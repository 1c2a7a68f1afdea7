"""One model, many layouts: losses, gradient norm and parameters equal those of a bare PyTorch loop on one process."""

from typing import Any

import pytest

from tests.distributed import run_in_processes

LOSS, NORM, PARAMETER = 2e-6, 3e-6, 1e-6
"""Tolerances; fp32 reorderings were seen to cause 6e-7, 1.5e-6 and 3e-7. `test_tolerances_catch_every_parameter` says they are tight."""

LAYOUTS: list[dict[str, Any]] = [
    {
        "parallel.tensor": tensor,
        "deepspeed.zero_optimization.stage": stage,
        "parallel.sequence": sequence,
        "parallel.activation_checkpointing": recompute,
        "batch.micro_size": 2 * tensor // accumulation,
    }
    for tensor in (1, 2, 4)
    for stage in (0, 1, 2, 3)
    for sequence in ((False, True) if tensor > 1 else (False,))
    for recompute in (False, True)
    for accumulation in (1, 2)
]

SPREAD: dict[str, Any] = {"parallel.tensor": 2, "parallel.sequence": True}
VARIANTS: list[dict[str, Any]] = [
    {"attention.kind": "dense"},
    {"attention.kind": "thin"},
    {"attention.trainable": False},
    {"attention.per": "head"},
    {"attention.pattern": "head_specific", "deepspeed.zero_optimization.stage": 3},
    {"attention.fold": False},
    {"attention.fold": False, "attention.per": "head", "attention.qk_norm": False},
    {"model.tie_embeddings": False, "deepspeed.zero_optimization.stage": 3},
    {"model.tie_embeddings": False, "parallel.sequence": False},
    {"model.positions": "learned", "deepspeed.zero_optimization.stage": 3},
    {"model.positions": "learned", "parallel.sequence": False, "deepspeed.zero_optimization.stage": 1},
    {"model.positions": "none", "model.bias": False, "model.norm": "rmsnorm"},
    {"model.num_kv_heads": 8, "attention.scale": "unbiased", "deepspeed.zero_optimization.stage": 2},
    {"optimizer.clip_norm": 0.0, "optimizer.lr": 0.05},
]

BROKEN: list[dict[str, Any]] = [
    {"break": "spa_dist.model.attention", "parallel.tensor": 2},  # S
    {"break": "spa_dist.parallel.layers", "parallel.tensor": 2},  # query and key norms
    {
        "break": "spa_dist.parallel.layers",
        "parallel.tensor": 2,
        "parallel.sequence": True,
        "attention.qk_norm": False,
    },  # norms
]


def agrees(result: dict[str, Any]) -> bool:
    """Whether a result is the bare loop's to rounding."""
    return result["loss"] <= LOSS and result["norm"] <= NORM and result["parameter"] <= PARAMETER


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """All cases in one launch of four processes, since each start costs seconds."""
    cases = LAYOUTS + [SPREAD | variant for variant in VARIANTS] + BROKEN
    return run_in_processes("tests.training.layouts:compare_layouts", 4, cases)


def test_every_layout_trains_the_same_model(results: list[dict[str, Any]]) -> None:
    """TP 1, 2, 4 × ZeRO 0–3 × sequence parallelism × recomputation × accumulation, and variants of the model."""
    sound = [result for result in results if not result["break"]]
    assert len(sound) == len(LAYOUTS) + len(VARIANTS)
    assert [result for result in sound if not agrees(result)] == []


def test_a_missing_all_reduce_is_seen(results: list[dict[str, Any]]) -> None:
    """The test of the test: without the sum over tensor-parallel ranks, losses and norm differ at once."""
    broken = [result for result in results if result["break"]]
    assert len(broken) == len(BROKEN)
    for result in broken:
        assert result["norm"] > 5 * NORM and result["loss"] > 2 * LOSS and result["parameter"] > 10 * PARAMETER, result


def test_tolerances_catch_every_parameter() -> None:
    """A gradient that is half of what it should be, on any one parameter, moves the losses and the norm past the tolerance."""
    changes = run_in_processes("tests.training.layouts:sensitivity", 1, {})
    missed = {name: change for name, change in changes.items() if change["loss"] <= LOSS or change["norm"] <= NORM}
    assert missed == {}
    assert all(change["parameter"] > 100 * PARAMETER for change in changes.values())
