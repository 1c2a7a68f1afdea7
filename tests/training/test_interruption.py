"""Real runs, stopped by SIGTERM and by SIGKILL of one rank, and resumed: every loss is that of the uninterrupted run, bit for bit."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import ROOT, free_port, rank_environment
from tests.synthetic import write_dataset

STEPS = 30
RANKS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset."""
    return write_dataset(tmp_path_factory.mktemp("data") / "synthetic")


def launch(run_dir: Path, dataset: Path, tensor: int, stage: int, resume: bool) -> list[subprocess.Popen]:
    """Start both ranks of a run as a launcher would."""
    overrides = [
        f"run.dir={run_dir}", f"run.steps={STEPS}", f"data.path={dataset}", f"parallel.tensor={tensor}",
        f"deepspeed.zero_optimization.stage={stage}", "model.num_layers=2", "model.hidden_size=64", "model.head_dim=16",
        "model.value_dim=16", "attention.d_proj=8", "attention.trainable=true", "model.sequence_length=64", "model.dropout=0.1",
        "model.attention_dropout=0.1", "batch.global_size=16", "batch.micro_size=4", "logging.every=1", "evaluation.every=10",
        "evaluation.sequences=16", "checkpoint.every=5", "logging.progress=false", "parallel.timeout_minutes=0.5",
    ]  # fmt: skip
    command = [sys.executable, "launch/pretrain.py", "--config", "spa_tiny.json", "--set", *overrides]
    port = free_port()
    return [
        subprocess.Popen(
            command + (["--resume", "auto"] if resume else []),
            env=rank_environment(rank, RANKS, port),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def finish(processes: list[subprocess.Popen]) -> list[int]:
    """Exit codes, once the ranks have ended; like a launcher, end the others when one dies."""
    deadline = time.monotonic() + 120
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0, 75) for process in processes):
            time.sleep(1.0)
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
    errors = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert all(code in (0, 75, -9) or "Connection" in error for code, error in zip(codes, errors)), (codes, errors)
    return codes


def wait_for_step(run_dir: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Return once the run has logged `step`."""
    log = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        assert all(process.poll() is None for process in processes), [process.communicate()[1] for process in processes]
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def losses(run_dir: Path) -> list[tuple[int, Any, Any, Any]]:
    """Step, training loss, gradient norm and validation loss of every line of the log, in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("grad_norm"), line.get("validation_loss")) for line in lines]


@pytest.mark.parametrize(("tensor", "stage"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_interrupted_runs_go_on_as_if_nothing_happened(tmp_path: Path, dataset: Path, tensor: int, stage: int) -> None:
    """SIGTERM to one rank, resume, SIGKILL of one rank, resume: the log equals the uninterrupted run's, dropout included."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert finish(launch(straight, dataset, tensor, stage, resume=False)) == [0, 0]

    processes = launch(broken, dataset, tensor, stage, resume=False)
    wait_for_step(broken, 7, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert finish(processes) == [75, 75]

    processes = launch(broken, dataset, tensor, stage, resume=True)
    wait_for_step(broken, 18, processes)
    processes[1].kill()
    assert 0 not in finish(processes)

    assert finish(launch(broken, dataset, tensor, stage, resume=True)) == [0, 0]
    assert [line[0] for line in losses(straight) if line[1] is not None] == list(range(1, STEPS + 1))
    assert losses(broken) == losses(straight)
