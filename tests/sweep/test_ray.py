"""Real sweeps on Ray, in real processes: killed and resumed, on a cluster that loses a node, and a population that exchanges weights.

The losses of each are compared with those of the same config under the `deepspeed` launcher, bit for bit.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import ROOT
from tests.sweep.processes import Watch, events_of, finish, is_alive, start_sweep, wait_for, workers
from tests.sweep.support import STEP_TOKENS, sweep_tree
from tests.synthetic import write_dataset

STEPS, EVERY = 24, 4
GONE_SECONDS = 10.0
SAID_BY_RUN = ("loss", "grad_norm", "lr", "validation_loss", "validation_word_perplexity")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all sweeps of this module, with their data in it."""
    root = tmp_path_factory.mktemp("sweeps")
    write_dataset(root / "data")
    return root


def write_sweep(folder: Path, name: str, **changes: Any) -> Path:
    """A sweep config of two points, which trains long enough to be interrupted."""
    tree = sweep_tree(folder / name, folder / "data", name=name, **changes)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tree))
    return path


TRIAL = {"tokens": STEPS * STEP_TOKENS, "report_tokens": EVERY * STEP_TOKENS, "workers": 2}


def results(sweep: Path) -> dict[str, dict[str, Any]]:
    """Lines of results.jsonl by trial; of an infeasible point, by its number."""
    lines = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    return {line.get("trial", str(line["point"])): line for line in lines}


def log_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """What a run logged, without its times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], *(line.get(key) for key in SAID_BY_RUN)) for line in lines]


def under_deepspeed(config: Path, run_dir: Path) -> list[tuple[Any, ...]]:
    """Run a config in two processes of the `deepspeed` launcher; what it logged."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "launch/pretrain.py"]
    command += ["--config", str(config), "--set", f"run.dir={run_dir}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return log_of(run_dir)


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, Any]:
    """A sweep of two points and one that cannot be trained, one at a time; its driver is killed in the middle of the second."""
    config = write_sweep(
        folder, "killed", space={"attention.d_proj": {"grid": [4, 64, 8]}}, trial=TRIAL, cluster={"nodes": [{"cpus": 2}]}
    )
    sweep = folder / "killed/sweep"
    process = start_sweep(config)
    wait_for(
        sweep,
        lambda event: event["event"] == "report" and event["trial"] == "p0002-s3" and event["tokens"] >= 2 * EVERY,
        process,
    )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = results(sweep)
    deadline = time.monotonic() + GONE_SECONDS
    while any(is_alive(worker) for worker in workers(sweep)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [worker for worker in workers(sweep) if is_alive(worker)]
    events = events_of(sweep)
    watch = Watch(sweep)
    watch.start()
    output = finish(start_sweep(config, "--resume"))
    return {
        "sweep": sweep, "config": config, "before": before, "left": left, "events": events, "output": output,
        "survived": watch.stop(),
    }  # fmt: skip


def test_kill_and_resume(killed: dict[str, Any]) -> None:
    """No finished trial runs again, none of its results is lost, the running one goes on from its checkpoint, all end."""
    after = results(killed["sweep"])
    assert killed["before"]["p0000-s3"] == after["p0000-s3"] and after["p0000-s3"]["attempts"] == 1
    assert {name: line["status"] for name, line in after.items()} == {
        "p0000-s3": "finished", "p0002-s3": "finished", "1": "infeasible",
    }  # fmt: skip
    assert "attention.d_proj=64 is larger than model.head_dim=16" in after["1"]["reason"]
    assert events_of(killed["sweep"])[: len(killed["events"])] == killed["events"]
    log = (killed["sweep"] / "trials/p0002-s3/log.txt").read_text()
    assert "resumed from" in log and after["p0002-s3"]["attempts"] == 2
    assert [line.split("│")[1].strip() for line in killed["output"].splitlines() if line.startswith("│")][-1] == "1"


def test_nobody_is_left(killed: dict[str, Any]) -> None:
    """Ten seconds after the driver was killed, or a trial ended, none of its processes lives."""
    assert killed["left"] == []
    assert len(killed["survived"]) == 6  # two workers of each attempt
    assert max(killed["survived"].values()) < GONE_SECONDS


def test_best_config_gives_the_trials_metrics_under_the_launcher(folder: Path, killed: dict[str, Any]) -> None:
    """best.json starts as it is under the deepspeed launcher, and logs what the winning trial logged, to the last digit."""
    best = json.loads((killed["sweep"] / "best.json").read_text())
    table = results(killed["sweep"])
    lowest = min(("p0000-s3", "p0002-s3"), key=lambda name: table[name]["validation_loss"])
    assert best["provenance"]["trials"] == [lowest]
    assert best["provenance"]["metrics"]["validation_loss"] == table[lowest]["validation_loss"]
    log = under_deepspeed(killed["sweep"] / "best.json", folder / "best")
    assert len(log) == STEPS + STEPS // EVERY + 1 and log == log_of(killed["sweep"] / "trials" / lowest)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes on this machine: a head without a CPU, and two that hold a trial each."""
    pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in the other sweeps: the last bits depend on the number of threads
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_lost_node(folder: Path, killed: dict[str, Any], cluster: Any) -> None:
    """The trials spread; one node goes without a word; its trial goes on elsewhere, and all results are those of an undisturbed sweep."""
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2))}
    config = write_sweep(
        folder, "lost", space={"attention.d_proj": {"grid": [4, 8]}}, trial=TRIAL, cluster={"nodes": [{"cpus": 2, "count": 2}],
        "address": cluster.address},
    )  # fmt: skip
    sweep = folder / "lost/sweep"
    process = start_sweep(config)
    wait_for(sweep, lambda event: event["event"] == "report", process)
    reported = next(event["trial"] for event in events_of(sweep) if event["event"] == "report")
    place = {worker["trial"]: worker["node"] for worker in workers(sweep)}
    cluster.remove_node(nodes[place[reported]], allow_graceful=False)
    finish(process)
    after, undisturbed = results(sweep), results(killed["sweep"])
    first = {worker["trial"]: worker["node"] for worker in reversed(workers(sweep))}
    assert set(first.values()) == set(nodes)  # a trial on each
    moved = [worker for worker in workers(sweep) if worker["trial"] == reported and worker["node"] != place[reported]]
    assert len(moved) == 2 and after[reported]["attempts"] == 2
    for name, other in (("p0000-s3", "p0000-s3"), ("p0001-s3", "p0002-s3")):
        assert after[name]["status"] == "finished"
        assert after[name]["validation_loss"] == undisturbed[other]["validation_loss"]
        assert log_of(sweep / "trials" / name) == log_of(killed["sweep"] / "trials" / other)


def test_a_population_hands_weights_over(folder: Path) -> None:
    """The worse member takes over the better one's checkpoint, file for file, and goes on from it with its own rate."""
    config = write_sweep(
        folder,
        "population",
        space={"optimizer.lr": {"grid": [0.01, 0.00001]}},
        trial={"tokens": 8 * STEP_TOKENS, "report_tokens": 4 * STEP_TOKENS, "workers": 1},
        set={"checkpoint.keep": 9},
        scheduler={"name": "pbt", "interval_tokens": 4 * STEP_TOKENS, "quantile": 0.5},
    )
    sweep = folder / "population/sweep"
    process = start_sweep(config)
    wait_for(sweep, lambda event: event["event"] == "settled", process)
    donor = manifest(sweep / "trials/p0000-s3", 4)
    finish(process)
    [exchange] = [event for event in events_of(sweep) if event["event"] == "exploit"]
    assert (exchange["trial"], exchange["donor"]) == ("p0001-s3", "p0000-s3")
    member = sweep / "trials/p0001-s3"
    assert manifest(member, 4)["files"] == donor["files"]
    assert f"resumed from {member}/checkpoints/step_00000004" in (member / "log.txt").read_text()
    lines = [json.loads(line) for line in (member / "metrics.jsonl").read_text().splitlines()]
    rate = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert rate[4] == 0.00001 and rate[8] == pytest.approx(exchange["values"]["optimizer.lr"] * (4 / 8) ** 0.5)
    assert manifest(member, 8)["config"]["optimizer"]["lr"] == exchange["values"]["optimizer.lr"]
    assert results(sweep)["p0001-s3"]["validation_loss"] < exchange["loss"] - 1.0


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    """Of a checkpoint."""
    return json.loads((run_dir / f"checkpoints/step_{step:08d}/manifest.json").read_text())
