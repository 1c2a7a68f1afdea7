"""Mask training at many layouts: masks, S and gates are those of a bare loop on one process, and the same bits on every rank."""

from typing import Any

import pytest
import torch

from spa_dist.training.masks.images import projection_image
from tests.distributed import run_in_processes
from tests.training.masking import GUMBEL, L0, MAGNITUDE, STEPS

TP, SP, STAGE = "parallel.tensor", "parallel.sequence", "deepspeed.zero_optimization.stage"
LOSS, NORM, PARAMETER = 5e-6, 2e-5, 2e-5
"""After 50 steps of Adam."""

CASES: list[dict[str, Any]] = [
    *({**MAGNITUDE, STAGE: stage} for stage in (0, 1, 2, 3)),
    {**MAGNITUDE, TP: 2, STAGE: 0},
    {**MAGNITUDE, TP: 2, STAGE: 1, SP: True},
    {**MAGNITUDE, TP: 2, STAGE: 2, "attention.per": "head", "attention.fold": False, "batch.micro_size": 2},
    {**MAGNITUDE, TP: 2, STAGE: 3, SP: True, "parallel.activation_checkpointing": True},
    {**GUMBEL, STAGE: 1, "batch.micro_size": 1},
    {**GUMBEL, TP: 2, STAGE: 3, SP: True, "parallel.activation_checkpointing": True},
    {**L0, STAGE: 2},
    {**L0, TP: 2, STAGE: 1, "attention.per": "head", SP: True},
]
HALF: list[dict[str, Any]] = [{**MAGNITUDE, TP: 2, STAGE: 2, "precision.dtype": "bf16"}]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """All cases in one launch of four processes."""
    return run_in_processes("tests.training.masking:compare_masks", 4, CASES + HALF, timeout=400)


def worst(results: list[dict[str, Any]]) -> dict[str, float]:
    """The largest difference of each kind."""
    return {key: max(result[key] for result in results) for key in ("mask", "loss", "norm", "learned", "other")}


def test_fifty_updates_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    """Masks to the bit, W, logits and gates to rounding; infinite where two ranks differ in a bit."""
    sound = [result for result in results if "precision.dtype" not in result["case"]]
    assert len(sound) == len(CASES) and all(result["steps"] == STEPS for result in sound)
    wrong = [
        {key: value for key, value in result.items() if key != "lines"}
        for result in sound
        if result["mask"] > 0
        or result["loss"] > LOSS
        or result["norm"] > NORM
        or max(result["learned"], result["other"]) > PARAMETER
    ]
    print(worst(sound))
    assert wrong == [], worst(sound)


def test_ranks_agree_in_half_precision(results: list[dict[str, Any]]) -> None:
    """The fp32 masters decide, so that all ranks hold the same masks, S and gates."""
    half = [result for result in results if "precision.dtype" in result["case"]]
    assert len(half) == len(HALF)
    for result in half:
        assert max(result["mask"], result["learned"], result["other"]) < float("inf"), result["case"]


def test_what_left_the_mask_is_zero_with_its_moments(results: list[dict[str, Any]]) -> None:
    """In the optimizer's own memory, on every rank, after each of the 50 updates."""
    assert [result["dirty_moments"] for result in results] == [0] * len(results)


def test_the_final_density_is_the_target_to_one_entry(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result["case"]["attention.mask.method"] == "magnitude":
            last = result["lines"][-1]
            assert last["step"] == STEPS and last["mask_density"] == [pytest.approx(round(0.3 * 32) / 32, abs=1e-12)] * 2
            assert last["mask_target_sparsity"] == pytest.approx(0.7)


def test_the_log_has_a_line_for_each_update(results: list[dict[str, Any]]) -> None:
    """Step 0 included; churn, ranks and, for an adaptive S, the gates."""
    for result in results:
        lines = result["lines"]
        assert [line["step"] for line in lines] == list(range(STEPS + 1))
        assert lines[0]["mask_churn"] == [None, None] and any(max(line["mask_churn"]) > 0 for line in lines[1:])
        adaptive = result["case"]["attention.pattern"] == "adaptive"
        assert all(("mask_gates" in line) == adaptive for line in lines)
        assert all(0 <= value <= 4 + 1e-9 for line in lines for value in line["mask_effective_rank"])


def without_lambda(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key != "attention.mask.l0_lambda"}


@pytest.fixture(scope="module")
def guarded() -> dict[str, dict[str, Any]]:
    """Runs with the default λ and with one that is far too large, warned of, stopped and repaired."""
    lam, action = "attention.mask.l0_lambda", "attention.mask.guard"
    cases = {
        "gumbel default": without_lambda(GUMBEL),
        "l0 default": without_lambda(L0),
        "gumbel large": {**GUMBEL, lam: 1.0},
        "l0 large": {**L0, lam: 0.02},
        "stop": {**GUMBEL, lam: 1.0, action: {"action": "stop"}},
        "gumbel repair": {**GUMBEL, lam: 1.0, action: {"action": "repair"}},
        "l0 repair": {**L0, lam: 0.02, "attention.per": "head", action: {"action": "repair"}},
        "magnitude repair": {**MAGNITUDE, "attention.sparsity": 0.75, action: {"action": "repair"}},
        "gates": {**GUMBEL, lam: 0.0, "optimizer.lr": 0.1, action: {"action": "repair", "max_gate": 1.5}},
    }
    return dict(zip(cases, run_in_processes("tests.training.masking:guarded", 1, list(cases.values()))))


@pytest.mark.parametrize("method", ["gumbel", "l0"])
def test_a_large_lambda_collapses_and_the_guard_says_what_to_change(guarded: dict[str, Any], method: str) -> None:
    """The paper's collapse; with the default λ nothing is said."""
    default, large = guarded[f"{method} default"], guarded[f"{method} large"]
    assert [line for line in default["said"] if line.startswith("step")] == []
    assert all(line["mask_faults"] == 0 for line in default["lines"]) and default["lines"][-1]["mask_rank"] == [4, 4]
    assert large["lines"][-1]["mask_faults"] > 0 and min(large["lines"][-1]["mask_rank"]) < 4
    found = [line for line in large["said"] if line.startswith("step")]
    assert found and all("layers." in line and "attention.projection: " in line for line in found)
    assert all("lower attention.mask.l0_lambda (now" in line and "\n" not in line for line in found)
    assert any("columns of S are empty" in line or "rank" in line for line in found)


def test_the_guard_stops_a_run(guarded: dict[str, Any]) -> None:
    ended = guarded["stop"]["ended"]
    assert ended.startswith("step ") and "layers.1.attention.projection: " in ended and "guard.action=stop" in ended


@pytest.mark.parametrize("method", ["gumbel", "l0", "magnitude"])
def test_the_guard_repairs(guarded: dict[str, Any], method: str) -> None:
    """No collapse stays: full rank to the end, and pruning keeps its number of entries."""
    result = guarded[f"{method} repair"]
    assert result["ended"] == "finished" and any(line.endswith("; repaired") for line in result["said"])
    assert result["lines"][-1]["mask_rank"] == [4, 4] and result["lines"][-1]["mask_empty_columns"] == [0, 0]
    if method == "magnitude":
        assert result["lines"][-1]["mask_density"] == [8 / 32, 8 / 32]


def test_gates_that_run_away_are_pulled_back(guarded: dict[str, Any]) -> None:
    said = [line for line in guarded["gates"]["said"] if ".attention.gate: the temperature" in line]
    assert said and "optimizer.lr" in said[0] and said[0].endswith("; repaired")
    values = [gate for line in guarded["gates"]["lines"] for gates in line["mask_gates"] for gate in gates]
    assert 1.49 < max(values) <= 1.5 + 1e-6  # the log shows them after the repair


def test_tensorboard_shows_s_over_time_and_every_number() -> None:
    """An image of each layer's S at each look, and scalars by layer, gates by head."""
    found = run_in_processes("tests.training.masking:tensorboard_of", 1, {**GUMBEL, "attention.mask.every": 20})
    names = [f"S/layers.{index}.attention.projection" for index in (0, 1)]
    assert sorted(found["images"]) == names
    assert [step for step, _, _ in found["images"][names[0]]] == [0, 20, 40, STEPS]
    assert found["images"][names[0]][0][1:] == [8 * 6, 4 * 6]
    wanted = {"mask/temperature", "mask/lambda", "mask/gates/1/7", "train/loss"}
    wanted |= {f"mask/{name}/{layer}" for name in ("density", "churn", "rank", "effective_rank") for layer in (0, 1)}
    assert wanted <= set(found["scalars"])


def test_the_picture_of_s() -> None:
    """White zero, red positive, blue negative; full colour at the largest value; heads side by side."""
    s = torch.tensor([[[1.0, 0.0], [-0.5, 0.25]], [[0.0, 0.0], [0.0, -1.0]]])
    picture = projection_image(s, scale=1)
    assert picture.shape == (2, 5, 3) and picture.dtype == torch.uint8
    assert picture[0, 0].tolist() == [255, 0, 0] and picture[0, 1].tolist() == [255, 255, 255]
    assert picture[1, 0].tolist() == [128, 128, 255] and picture[1, 1].tolist() == [255, 191, 191]
    assert picture[1, 4].tolist() == [0, 0, 255] and picture[:, 2].unique().tolist() == [255]
