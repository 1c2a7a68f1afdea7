"""The whole checks of sweeps, on real data; minutes each: `python -m pytest -m slow -s tests/sweep/test_full.py`."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spa_dist.sweep.load import load_sweep
from spa_dist.sweep.results import rows
from spa_dist.sweep.state import State
from tests.distributed import ROOT
from tests.sweep.processes import Watch, events_of, finish, is_alive, start_sweep, wait_for, workers
from tests.sweep.test_ray import GONE_SECONDS, log_of, results, under_deepspeed

pytestmark = pytest.mark.slow
SMOKE = ROOT / "configs/sweep_smoke.json"
FOUR = ['space.attention.d_proj={"grid": [8, 12, 16, 24]}', 'scheduler={"name": "none"}', "seeds=[1]"]
FOUR += ['space.optimizer.lr={"grid": [0.003]}', 'cluster.nodes=[{"cpus": 4}]']


@pytest.fixture(scope="module")
def data() -> str:
    """Real text: the Python source that `make quickstart` trains on."""
    path = ROOT / "data/python"
    if not path.exists():
        prepare = [sys.executable, "data_pipeline/prepare.py", "--source", "python", "--output", str(path)]
        subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)
    return f'set.data.path="{path}"'


def test_smoke(data: str, tmp_path: Path) -> None:
    """sweep_smoke.json: at least 6 trials of 2 processes in under 10 minutes, nobody left after 10 seconds, its best config starts."""
    sweep = tmp_path / "sweep"
    watch = Watch(sweep)
    watch.start()
    began = time.monotonic()
    output = finish(start_sweep(SMOKE, "--set", data, f"dir={sweep}"), timeout=1200)
    seconds = time.monotonic() - began
    survived = watch.stop()
    after = results(sweep)
    print(output)
    print(f"smoke: {len(after)} trials, {len(survived)} processes, {seconds:.0f} s")
    print(f"smoke: longest seen alive after its trial was stopped: {max(survived.values()):.1f} s")
    assert len(after) == 8 and len(survived) == 2 * len(after) and seconds < 600
    assert [line["status"] for line in after.values()].count("stopped") >= 2
    assert max(survived.values()) < GONE_SECONDS and not any(is_alive(worker) for worker in workers(sweep))
    best = json.loads((sweep / "best.json").read_text())
    log = under_deepspeed(sweep / "best.json", tmp_path / "best")
    print(f"smoke: best.json {best['provenance']['values']} starts; {len(log)} lines equal the trial's")
    assert log == log_of(sweep / "trials" / best["provenance"]["trials"][0])
    for name in ("pareto.png", "parallel.png", "tensorboard"):
        assert (sweep / name).exists()


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four trials that nothing happens to."""
    sweep = tmp_path_factory.mktemp("undisturbed") / "sweep"
    finish(start_sweep(SMOKE, "--set", data, f"dir={sweep}", *FOUR), timeout=1200)
    return sweep


def table(sweep: Path) -> list[tuple[Any, ...]]:
    """The final table without what a clock measured."""
    state = State()
    for event in events_of(sweep):
        state.apply(event)
    config = load_sweep(sweep / "sweep.json")
    return [
        (row.point, row.values, row.status, row.tokens, row.metrics["validation_loss"], row.seeds)
        for row in rows(state, config)
    ]


def test_kill_and_resume(data: str, undisturbed: Path, tmp_path: Path) -> None:
    """The driver is killed twice; no finished trial runs again, no result is lost, and the final table is the undisturbed one."""
    sweep = tmp_path / "sweep"
    kept: dict[str, Any] = {}
    for count in (1, 3):
        process = start_sweep(SMOKE, "--set", data, f"dir={sweep}", *FOUR, *(["--resume"] if count > 1 else []))
        wait_for(sweep, lambda event, n=count: sum(e["event"] == "end" for e in events_of(sweep)) >= n, process)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kept |= {name: line for name, line in results(sweep).items() if line["status"] == "finished"}
    finish(start_sweep(SMOKE, "--set", data, f"dir={sweep}", *FOUR, "--resume"))
    after = results(sweep)
    print(
        "kill: finished before a kill:", sorted(kept), "attempts:", {name: line["attempts"] for name, line in after.items()}
    )
    for name, line in kept.items():
        assert after[name] == line  # its attempts among it: what had finished was not started again
    assert table(sweep) == table(undisturbed)
    for name in after:
        assert log_of(sweep / "trials" / name) == log_of(undisturbed / "trials" / name)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without a CPU."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_lost_node(data: str, undisturbed: Path, cluster: Any, tmp_path: Path) -> None:
    """Four trials on three nodes of two CPUs; one node goes without a word."""
    nodes = {node.node_id: node for node in [cluster.add_node(num_cpus=2) for _ in range(3)]}
    sweep = tmp_path / "sweep"
    where = [f"cluster.address={cluster.address}", 'cluster.nodes=[{"cpus": 2, "count": 3}]']
    process = start_sweep(SMOKE, "--set", data, f"dir={sweep}", *FOUR, *where)
    wait_for(sweep, lambda event: event["event"] == "report", process)
    reported = next(event["trial"] for event in events_of(sweep) if event["event"] == "report")
    place = {worker["trial"]: worker["node"] for worker in workers(sweep)}
    assert len(set(place.values())) == len(place) >= 2, "the trials have spread"
    cluster.remove_node(nodes[place[reported]], allow_graceful=False)
    finish(process, timeout=1200)
    after = results(sweep)
    print(
        "node: places before",
        place,
        "removed",
        place[reported],
        "attempts",
        {name: line["attempts"] for name, line in after.items()},
    )
    later = [worker["node"] for worker in workers(sweep) if worker["trial"] == reported]
    assert after[reported]["attempts"] == 2 and set(later[2:]) - {place[reported]} == set(later[2:])
    assert table(sweep) == table(undisturbed)
