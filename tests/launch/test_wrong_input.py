"""A user's mistake at the command line: one line on stderr that names it, exit code 2, no process group, nothing written."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ROOT
from tests.synthetic import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset."""
    return write_dataset(tmp_path_factory.mktemp("data") / "synthetic")


def run(
    script: str, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Run a command in this process; its exit code and stderr."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return int(ended.value.code or 0), capsys.readouterr().err


def test_pretrain(
    tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config, batch arithmetic, device, dataset, tokenizer, and a run that is there already."""
    run_dir = tmp_path / "run"
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    (other / "tokenizer.model").write_bytes((other / "tokenizer.model").read_bytes()[:-10])
    no_train = tmp_path / "no train"
    shutil.copytree(dataset, no_train)
    next(no_train.glob("train-*.tar")).unlink()
    cases = {
        "nothing.json": (["--config", "nothing.json"], "config 'nothing.json' not found"),
        "typo": (["--config", "spa_tiny", "--set", "model.num_layer=2"], "did you mean model.num_layers?"),
        "width": (["--config", "spa_tiny", "--set", "attention.d_proj=65"], "attention.d_proj=65"),
        "heads": (["--config", "spa_tiny", "--set", "parallel.tensor=3"], "not divisible by parallel.tensor=3"),
        "processes": (["--config", "spa_tiny", "--set", "parallel.tensor=2"], "parallel.tensor=2 does not divide"),
        "batch": (["--config", "spa_tiny", "--set", "batch.micro_size=5"], "batch.micro_size=5"),
        "pattern": (["--config", "spa_tiny", "--set", "attention.pattern=bloc"], "did you mean block?"),
        "no data": (["--config", "spa_tiny", "--set", f"data.path={tmp_path / 'none'}"], "none"),
        "tokenizer": (["--config", "spa_tiny", "--set", f"data.path={other}"], "tokenizer.model"),
        "shard": (["--config", "spa_tiny", "--set", f"data.path={no_train}"], ".tar"),
        "vocabulary": (
            ["--config", "spa_tiny", "--set", f"data.path={dataset}", "model.vocab_size=7"],
            "model.vocab_size=7",
        ),
        "split": (["--config", "spa_tiny", "--set", f"data.path={dataset}", "evaluation.split=tset"], "tset"),
    }
    if not torch.cuda.is_available():
        cases["cuda"] = (["--config", "spa_tiny", "--set", "run.device=cuda", f"data.path={dataset}"], "run.device=cuda")
    for name, (arguments, message) in cases.items():
        overrides = [f"run.dir={run_dir}"]
        code, error = run("launch/pretrain.py", [*arguments, "--set", *overrides], capsys, monkeypatch)
        assert (code, error.count("\n")) == (2, 1), (name, error)
        assert error.startswith("pretrain.py: error: ") and message in error, (name, error)
    assert not dist.is_initialized() and not run_dir.exists()


def test_existing_run_is_not_overwritten(
    tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has checkpoints is gone on from, or left alone."""
    (tmp_path / "run/checkpoints/step_00000001").mkdir(parents=True)
    arguments = ["--config", "spa_tiny", "--set", f"data.path={dataset}", f"run.dir={tmp_path / 'run'}"]
    code, error = run("launch/pretrain.py", arguments, capsys, monkeypatch)
    assert code == 2 and "--resume auto" in error and not dist.is_initialized()


def test_other_commands(
    tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare, convert, evaluate, generate and plot."""
    empty = tmp_path / "empty"
    empty.mkdir()
    out = str(tmp_path / "out")
    (tmp_path / "blank.txt").write_text(" \n")
    cases = [
        ("data_pipeline/prepare.py", ["--source", "text", "--input", str(empty), "--output", out], "no text"),
        ("data_pipeline/prepare.py", ["--source", "text", "--input", str(tmp_path / "blank.txt"), "--output", out], "no text"),
        ("data_pipeline/prepare.py", ["--source", "text", "--input", str(tmp_path / "gone"), "--output", out], "gone"),
        ("data_pipeline/prepare.py", ["--source", "pg19", "--input", str(empty), "--output", out], "train/"),
        ("data_pipeline/prepare.py", ["--source", "arxiv", "--input", str(empty), "--output", out], "no text"),
        ("data_pipeline/prepare.py", ["--source", "text", "--input", str(ROOT / "configs"), "--output", str(dataset)], "--force"),
        ("tools/convert_checkpoint.py", ["--checkpoint", str(empty), "--output", out], "no checkpoint"),
        ("launch/evaluate.py", ["--model", str(empty), "--data", str(dataset)], "empty"),
        ("launch/generate.py", ["--model", str(empty), "--prompt", "x"], "empty"),
        ("tools/plot_metrics.py", [str(tmp_path / "gone.jsonl"), "--output", out], "gone.jsonl"),
    ]  # fmt: skip
    for script, arguments, message in cases:
        code, error = run(script, arguments, capsys, monkeypatch)
        last = error.strip().splitlines()[-1]
        assert code == 2 and f"{Path(script).name}: error: " in last and message in last, (script, arguments, error)
    assert not Path(out).exists() and [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_under_the_launcher_too() -> None:
    """Two ranks meet the same mistake: rank 0 says it once, and the launcher's exit code is 2."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [launcher, "--num_accelerators", "2", "launch/pretrain.py", "--config", "spa_tiny", "--set", "model.depth=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count("pretrain.py: error: unknown key model.depth") == 1


def test_a_run_that_cannot_go_on_says_so(tmp_path: Path, dataset: Path) -> None:
    """A gradient that is not finite ends the run before the step where the config asks for it: one line, exit code 3."""
    overrides = ["optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.clip_norm=0", "optimizer.nonfinite=stop"]
    small = [
        "model.num_layers=1",
        "model.sequence_length=32",
        "batch.global_size=4",
        "evaluation.sequences=4",
        "logging.progress=false",
    ]
    command = [sys.executable, "launch/pretrain.py", "--config", "spa_tiny", "--set", *overrides, *small]
    places = [f"data.path={dataset}", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pretrain.py: error: step ") and "samples" in last and "optimizer.nonfinite=stop" in last


def test_dry_run_prints_a_plan(tmp_path: Path) -> None:
    """The large model on two processes, planned without data and without a process group."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [launcher, "--num_accelerators", "2", "launch/pretrain.py", "--config", "spa_large.json", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    config = json.loads((ROOT / "configs/spa_large.json").read_text())["model"]
    for text in ("parameters", "tokens per step", "memory/rank", f"{config['num_layers']} layers × {config['hidden_size']}"):
        assert done.stdout.count(text) == 1, done.stdout
