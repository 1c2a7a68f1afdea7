"""Checkpoints at every layout: bit-equal at the same one, equal to rounding at another, readable as a plain model; damage named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_in_processes

ZERO = "deepspeed.zero_optimization.stage"


def case(tensor: int, stage: int, then: list[tuple[int, int]], **more: Any) -> dict[str, Any]:
    """Train at (tensor, stage), go on at each of `then`."""
    changes = {"parallel.tensor": tensor, ZERO: stage} | {key.replace("__", "."): value for key, value in more.items()}
    return {"changes": changes, "then": [{"parallel.tensor": t, ZERO: s} for t, s in then]}


CASES = [
    case(1, 0, [(1, 0), (1, 1)]),
    case(1, 1, [(1, 1), (1, 3), (2, 1)], attention__per="head"),
    case(1, 2, [(1, 2)], attention__kind="thin"),
    case(1, 3, [(1, 3), (1, 0)], model__tie_embeddings=False),
    case(2, 0, [(2, 0)], attention__trainable=False),
    case(2, 1, [(2, 1), (1, 3)], model__positions="learned"),
    case(2, 3, [(2, 3), (2, 2), (1, 0)], attention__pattern="head_specific"),
    case(1, 1, [(1, 1)], precision__dtype="bf16"),
    case(1, 2, [(1, 2)], precision__dtype="bf16"),
    case(1, 3, [(1, 3)], precision__dtype="bf16"),
    case(2, 0, [(2, 0)], precision__dtype="bf16"),
    *(case(1, stage, [(1, stage)], precision__dtype="fp16") for stage in (0, 1, 2, 3)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases in one launch of two processes."""
    folder = tmp_path_factory.mktemp("runs")
    return run_in_processes("tests.training.elastic:save_and_continue", 2, {"folder": str(folder), "cases": CASES})


def is_same_layout(result: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether a run went on at the layout at which it was saved."""
    return all(result["changes"][key] == value for key, value in then["changes"].items())


def test_resume_at_the_same_layout_is_bit_equal(results: list[dict[str, Any]]) -> None:
    """The two steps after the checkpoint, resumed, are those of the run that was not interrupted: loss and gradient norm."""
    checked = 0
    for result in results:
        for then in result["then"]:
            assert then["cursor"] == 16
            if is_same_layout(result, then):
                assert then["steps"] == result["continued"], result["changes"]
                checked += 1
    assert checked == len(CASES)


def test_resume_at_another_layout_goes_on(results: list[dict[str, Any]]) -> None:
    """Another tensor-parallel size, data-parallel size or ZeRO stage: the same losses to 1e-5."""
    for result in results:
        for then in result["then"]:
            for now, expected in zip(then["steps"], result["continued"]):
                assert now["loss"] == pytest.approx(expected["loss"], abs=1e-5), (result["changes"], then["changes"])
                assert now["norm"] == pytest.approx(expected["norm"], rel=1e-4), (result["changes"], then["changes"])


def test_plain_model_of_every_layout_has_the_trainers_loss(results: list[dict[str, Any]]) -> None:
    """Merged through the layout table, folded or not, without vocabulary padding."""
    for result in results:
        tolerance = 2e-6 if "precision.dtype" not in result["changes"] else 3e-2
        assert result["plain"] == pytest.approx([result["trained"]] * 2, abs=tolerance), result["changes"]


def make_run(folder: Path, steps: tuple[int, ...]) -> Path:
    """A run with whole checkpoints of two files each."""
    import hashlib

    for step in steps:
        place = folder / "checkpoints" / f"step_{step:08d}"
        place.mkdir(parents=True)
        files = {}
        for name in ("weights-tp00-dp000.safetensors", "weights-tp00-dp001.safetensors"):
            content = f"{step}/{name}".encode() * 100
            (place / name).write_bytes(content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {"format": "spa_dist.checkpoint/1", "files": files, "parallel": {"tensor": 1, "data": 2}}
        (place / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path) -> None:
    """Truncated, bit-flipped, missing, uncommitted, or with a torn manifest: all ranks agree on the newest good one."""
    whole = make_run(tmp_path / "whole", (1, 2, 3))
    newest = "checkpoints/step_00000003"
    names = ("whole", "truncated", "flipped", "missing", "uncommitted", "torn", "all bad", "empty")
    for name in names[1:-1]:
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "empty").mkdir()
    weights = f"{newest}/weights-tp00-dp001.safetensors"
    content = (whole / weights).read_bytes()
    (tmp_path / "truncated" / weights).write_bytes(content[:-1])
    (tmp_path / "flipped" / weights).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    (tmp_path / "missing" / weights).unlink()
    (tmp_path / "uncommitted" / newest / "manifest.json").unlink()
    (tmp_path / "torn" / newest / "manifest.json").write_text('{"format": "spa_dist')
    for step in (1, 2, 3):
        (tmp_path / "all bad" / f"checkpoints/step_{step:08d}/weights-tp00-dp000.safetensors").write_bytes(b"")
    found = run_in_processes("tests.training.elastic:choose_each", 2, [str(tmp_path / name) for name in names])
    answers = dict(zip(names, (each["answers"] for each in found)))
    good = dict.fromkeys(("truncated", "flipped", "missing", "uncommitted", "torn"), ["step_00000002"] * 2)
    assert {name: answers[name] for name in good} == good
    assert answers["whole"] == ["step_00000003"] * 2
    assert answers["empty"] == [None, None]
    assert all(answer.startswith("CheckpointError") and "step_00000003" in answer for answer in answers["all bad"])


def test_a_nan_on_one_rank_is_skipped_on_all() -> None:
    """Nothing changes in that step, on any rank, at any stage and precision; the next step goes on."""
    cases = [{ZERO: stage, "precision.dtype": dtype} for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
    for result in run_in_processes("tests.training.elastic:poisoned", 2, cases):
        assert result["answers"] == [[True, True, False, True]] * 2, result


def test_overflow_lowers_the_loss_scale_and_the_scale_is_resumed(results: list[dict[str, Any]]) -> None:
    """fp16 starts at 2^16 and every stage skips a step that overflows; what the scale was is part of the resumed steps."""
    seen = [result for result in results if result["changes"].get("precision.dtype") == "fp16"]
    assert len(seen) == 4 and all(step["scale"] > 1 for result in seen for step in result["continued"])
