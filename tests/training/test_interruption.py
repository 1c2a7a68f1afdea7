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
LEARNED = ["attention.pattern=learned", "attention.per=head", "attention.mask.every=4", "attention.mask.lr_scale=100"]
PROJECTIONS: dict[str, list[str]] = {
    "trained": ["attention.trainable=true"],
    "magnitude": [
        "attention.pattern=learned", "attention.mask.method=magnitude", "attention.mask.every=4", "attention.sparsity=0.7",
        'attention.mask.magnitude={"last_step": 26, "regrow": 0.4}',
    ],
    "gumbel": [*LEARNED, "attention.pattern=adaptive", "attention.mask.method=gumbel", "attention.mask.gumbel={}"],
    "l0": [*LEARNED, "attention.mask.method=l0", "attention.mask.l0={}", "attention.mask.l0_warmup_steps=20"],
}  # fmt: skip
"""How S is trained: W alone, or with a mask whose schedule the interruptions fall into."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset."""
    return write_dataset(tmp_path_factory.mktemp("data") / "synthetic")


def launch(run_dir: Path, dataset: Path, tensor: int, stage: int, projection: str, resume: bool) -> list[subprocess.Popen]:
    """Start both ranks of a run as a launcher would."""
    overrides = [
        f"run.dir={run_dir}", f"run.steps={STEPS}", f"data.path={dataset}", f"parallel.tensor={tensor}",
        f"deepspeed.zero_optimization.stage={stage}", "model.num_layers=2", "model.hidden_size=64", "model.head_dim=16",
        "model.value_dim=16", "attention.d_proj=8", *PROJECTIONS[projection], "model.sequence_length=64", "model.dropout=0.1",
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


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of the log without what the clock decides; without churn, which counts from the last look of the process."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "tokens", "loss", "grad_norm", "validation_loss", "lr")
    return [{k: v for k, v in line.items() if k in kept or (k.startswith("mask_") and k != "mask_churn")} for line in lines]


def last_files(run_dir: Path) -> dict[str, Any]:
    """Size and hash of each file of the last checkpoint: weights, masks, gates and moments to the bit."""
    return json.loads((run_dir / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())["files"]


@pytest.mark.parametrize(
    ("tensor", "stage", "projection"),
    [(1, 1, "magnitude"), (1, 3, "gumbel"), (2, 1, "trained"), (2, 1, "l0"), (2, 3, "magnitude")],
)
def test_interrupted_runs_go_on_as_if_nothing_happened(
    tmp_path: Path, dataset: Path, tensor: int, stage: int, projection: str
) -> None:
    """SIGTERM to one rank, resume, SIGKILL of one rank, resume: the log and the last checkpoint equal the uninterrupted run's,
    dropout included."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    layout = (tensor, stage, projection)
    assert finish(launch(straight, dataset, *layout, resume=False)) == [0, 0]

    processes = launch(broken, dataset, *layout, resume=False)
    wait_for_step(broken, 7, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert finish(processes) == [75, 75]

    processes = launch(broken, dataset, *layout, resume=True)
    wait_for_step(broken, 18, processes)
    processes[1].kill()
    assert 0 not in finish(processes)

    assert finish(launch(broken, dataset, *layout, resume=True)) == [0, 0]
    if (tensor, stage) == (1, 1):  # once more, when it has finished: nothing is done or logged again
        assert finish(launch(broken, dataset, *layout, resume=True)) == [0, 0]
    assert [line["step"] for line in log_of(straight) if "loss" in line] == list(range(1, STEPS + 1))
    assert log_of(broken) == log_of(straight)
    assert last_files(broken) == last_files(straight)
