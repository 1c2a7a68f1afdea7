"""A wrong config ends `pretrain.py` before a process group exists; a run with checkpoints is left as it was."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import ROOT
from tests.synthetic import write_dataset

CASES = [
    (["model.num_layer=2"], "unknown key model.num_layer; did you mean model.num_layers?"),
    (["parallel.pipeline=2"], "parallel.pipeline=2: pipeline parallelism is not supported"),
    (["deepspeed.zero_optimisation.stage=1"], "unknown key deepspeed.zero_optimisation; did you mean deepspeed.zero_optimization?"),
    (["deepspeed.zero_optimization.stag=1"], "unknown key deepspeed.zero_optimization.stag; did you mean"),
    (["deepspeed.gradient_clipping=1"], "deepspeed.gradient_clipping is set by optimizer.clip_norm"),
    (["attention.pattern=bloc"], "attention.pattern: 'bloc' is not one of"),
    (["batch.global_size=9"], "batch.global_size=9 is not a multiple of the data-parallel size 2"),
]  # fmt: skip


def start(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int | str | None, str]:
    """Run the command in this process, as rank 0 of two that may not meet; its exit code and stderr."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(sys, "argv", ["launch/pretrain.py", *arguments])
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "launch/pretrain.py"), run_name="__main__")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "message"), CASES)
def test_one_line_exit_2_no_process_group(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--config", "spa_tiny", "--set", f"run.dir={tmp_path / 'run'}", *overrides]
    code, error = start(arguments, capsys, monkeypatch)
    assert code == 2 and error.startswith(f"pretrain.py: error: {message}") and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "message"), [("{'run': 1}", "is not JSON"), ("3", "must hold a JSON object")])
def test_a_file_that_is_no_config(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    code, error = start(["--config", str(path), "--set", f"run.dir={tmp_path / 'run'}"], capsys, monkeypatch)
    assert code == 2 and error.startswith(f"pretrain.py: error: config {path} {message}") and error.count("\n") == 1, error
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]


def pretrain(*overrides: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "launch/pretrain.py", "--config", "spa_tiny", "--set", *overrides]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"WORLD_SIZE": "1"}, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_run_with_checkpoints_is_left_as_it_was(tmp_path: Path) -> None:
    """Without `--resume`, nothing of it is written; the way out is said last."""
    data, run_dir = write_dataset(tmp_path / "data"), tmp_path / "run"
    step = run_dir / "checkpoints/step_00000001"
    step.mkdir(parents=True)
    done = pretrain(f"data.path={data}", f"run.dir={run_dir}")
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("pretrain.py: error: ")]
    assert len(errors) == 1 and f"{run_dir} already holds checkpoints" in errors[0] and "--resume auto" in errors[0]
    assert "Traceback" not in done.stderr
    assert sorted(run_dir.rglob("*")) == [run_dir / "checkpoints", step]


def test_a_typo_costs_no_start_up(tmp_path: Path) -> None:
    """stderr is that one line, stdout is empty."""
    done = pretrain("model.num_layer=2", f"run.dir={tmp_path / 'run'}")
    message = "pretrain.py: error: unknown key model.num_layer; did you mean model.num_layers?\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, message, "")
