"""The command's runs in real processes: what is finished is not run again, what is interrupted leaves nothing."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_pipeline.dataset import open_dataset
from spa_dist.comparison import language
from spa_dist.comparison.jobs import Job, Results, in_order, write_result
from spa_dist.comparison.runner import Runner
from spa_dist.comparison.tasks import task_jobs, task_settings
from spa_dist.comparison.variants import VARIANTS
from spa_dist.config import config_from_dict
from spa_dist.config.rules import idle_options
from spa_dist.errors import DataError
from spa_dist.model.build import check_start
from tests.distributed import ROOT
from tests.synthetic import write_dataset


def run_jobs(results: Results, jobs: list[Job], settings: dict[str, Any], data: Path | None = None, **options: Any) -> tuple:
    lines: list[str] = []
    given = {"workers": 2, "budget_seconds": None, "finished": lambda: None} | options
    runner = Runner(results, settings, data=data, say=lines.append, **given)
    return runner, runner.run(jobs), lines


def test_a_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Two tasks side by side; a second call runs nothing, other settings are refused, a run that fails leaves no file."""
    data = write_dataset(tmp_path / "data")
    results = Results(tmp_path / "out")
    settings = task_settings("lm", data, steps=8) | {"every": 2, "sequences": 4}
    job = Job("lm", "adaptive magnitude, paper", 16, None, 0)
    wrong = Job("lm", "learned magnitude, paper", 96, None, 0)  # d_k′ above d_k
    counted: list[int] = []
    runner, left, _ = run_jobs(results, [job, wrong], settings, data, finished=lambda: counted.append(1))
    assert left == 0 and counted == [1] and [path.name for path in results.raw.iterdir()] == [results.path(job).name]
    assert len(runner.failed) == 1 and "attention.d_proj=96" in runner.failed[0]

    text = results.path(job).read_text()
    result = json.loads(text)
    assert str(tmp_path) not in text
    assert result["curve"][-1]["step"] == 8 and result["curve"][-1]["tokens"] == 8 * 4 * 256
    assert result["final"]["token_perplexity"] == pytest.approx(math.exp(result["curve"][-1]["validation_loss"]))
    assert result["final"]["mask_density"] == pytest.approx([0.2] * 4, abs=0.5 / (64 * 16))
    # 384 rows of embedding; per layer norms, Q and K at 16, V, O, feed-forward; the last norm. S and gates on top, in training.
    plain = 384 * 128 + 256 + 4 * (2 * 256 + 2 * 64 * 129 + 2 * 128 * 128 + 256 + 8 * 128 * 128 + 5 * 128)
    assert result["folded_parameters"] == plain
    assert result["parameters"] == plain + 4 * (2 * 192 * 129 + 64 * 16 + 4)
    assert result["cache_numbers_per_token"] == 4 * 4 * (16 + 32)

    before = results.path(job).stat().st_mtime_ns
    assert run_jobs(results, [job], settings, data)[1:] == (0, ["1 runs, 1 of them finished before"])
    assert results.path(job).stat().st_mtime_ns == before
    with pytest.raises(DataError, match="other settings"):
        run_jobs(results, [job], settings | {"steps": 9}, data)


def test_the_budget_ends_it(tmp_path: Path) -> None:
    jobs = [Job("recall", "thin", 8, 16, seed) for seed in (0, 1)]
    assert run_jobs(Results(tmp_path), jobs, {}, budget_seconds=0.0)[1] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """The command and its runs are gone, and there is no file, whole or half."""
    command = [sys.executable, "tools/compare_attention.py", "--task", "recall", "--output", str(tmp_path / "out")]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [*command, "--only", "dense", "--steps", "1000000"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell's script started with &
    )
    children: list[psutil.Process] = []
    try:
        while len(children) < 4:  # two workers and what each of them runs
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(30) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        assert not any(child.is_running() for child in children)
        assert not any(path.is_file() for path in tmp_path.rglob("*")), list(tmp_path.rglob("*"))
    finally:
        for one in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def test_a_result_is_whole_or_not_there(tmp_path: Path) -> None:
    job = Job("lm", "thin", 8, None, 0)
    results = Results(tmp_path)
    with pytest.raises(ValueError):
        write_result(results.path(job), job, {}, {"final": {"loss": math.nan}})
    assert not results.has(job, {}) and not results.read("lm")
    results.path(job).write_text('{"job"')
    with pytest.raises(DataError, match="remove it"):
        results.has(job, {})


def test_seeds_come_one_after_the_other() -> None:
    """Stopped at any seed the table is balanced; dense attention has no width and comes once; every file has its own name."""
    jobs = task_jobs("lm", None, 3)
    ablations = sum(variant.ablation for variant in VARIANTS)
    assert len(jobs) == 3 * (2 + 2 * (len(VARIANTS) - 2))
    for part, count in (
        (jobs[: -6 * ablations], 2 + 2 * (len(VARIANTS) - 2 - ablations)),
        (jobs[-6 * ablations :], 2 * ablations),
    ):
        assert [job.seed for job in part] == [0] * count + [1] * count + [2] * count
        assert len({job.definition().ablation for job in part}) == 1
    for task in ("lm", "recall"):
        names = [job.name for job in task_jobs(task, None, 3)]
        assert len(set(names)) == len(names) and all(name.replace("-", "").replace("_", "").isalnum() for name in names)
    assert list(in_order("lm", [], 3)) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("d_proj", language.WIDTHS)
def test_every_config_is_whole(variant, d_proj: int, tmp_path: Path) -> None:
    """It passes the rules, sets no option that does nothing, and S starts denser than it ends."""
    job = Job("lm", variant.name, d_proj if variant.has_width else None, None, 1)
    settings = {"steps": 480, "batch": 4, "sequences": 8, "learning_rate": 1e-3, **language.SETTINGS}
    config = language.run_config(job, settings, tmp_path, tmp_path / "run")
    check_start(config)
    assert list(idle_options(config)) == []
    assert config.attention.gate == ("gate" in variant.name or "adaptive" in variant.name)
    assert config_from_dict(config.model_dump(mode="json")) == config


def test_the_dataset_is_part_of_the_settings(tmp_path: Path) -> None:
    one, two = (write_dataset(tmp_path / str(size), vocab_size=size, documents=200, streams=2) for size in (300, 310))
    assert language.settings(open_dataset(one), 5) != language.settings(open_dataset(two), 5)
