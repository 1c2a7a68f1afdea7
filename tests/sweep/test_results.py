"""Ranking on the mean over seeds, the Pareto front, the ledger, and what the files say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spa_dist.errors import DataError
from spa_dist.sweep.ledger import Ledger, read_events
from spa_dist.sweep.plots import write_plots
from spa_dist.sweep.results import METRICS, pareto_front, rows, write_results
from spa_dist.sweep.state import State
from tests.sweep.support import Simulation, sweep_tree

ROUNDED = st.integers(0, 4)


@given(st.lists(st.tuples(ROUNDED, ROUNDED, ROUNDED), max_size=12))
def test_front_by_brute_force(places: list[tuple[int, int, int]]) -> None:
    """Against the definition, with speed maximised and the others minimised, ties included."""
    names = ["validation_loss", "tokens_per_second", "cache_bytes_per_token"]
    metrics: list[dict[str, float | None]] = [dict(zip(names, place)) for place in places]

    def dominates(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        no_worse = a[0] <= b[0] and a[1] >= b[1] and a[2] <= b[2]
        return no_worse and a != b

    expected = [i for i, own in enumerate(places) if not any(dominates(other, own) for other in places)]
    assert pareto_front(metrics, names) == expected


def test_front_leaves_out_what_was_not_measured() -> None:
    metrics: list[dict[str, float | None]] = [
        {"validation_loss": 1.0, "parameters": None},
        {"validation_loss": 2.0, "parameters": 1.0},
    ]
    assert pareto_front(metrics, ["validation_loss", "parameters"]) == [1]


def lucky(values: dict[str, Any], seed: int, tokens: int) -> float:
    """Point 4 has the best single seed, point 8 the best mean; point 2 diverges."""
    table = {(4, 1): 1.0, (4, 2): 9.0, (8, 1): 3.0, (8, 2): 4.0, (2, 1): math.nan, (2, 2): 0.5}
    return table[values["attention.d_proj"], seed]


def simulate(folder: Path, **changes: Any) -> tuple[Simulation, State]:
    tree = sweep_tree(folder, folder, seeds=[1, 2], **changes)
    tree["space"] = {"attention.d_proj": {"grid": [4, 64, 8, 2]}}
    bad = lambda values: "too wide" if values["attention.d_proj"] == 64 else None  # noqa: E731
    simulation = Simulation(folder / "sweep/events.jsonl", tree, lucky, slots=3, bad=bad)
    return simulation, simulation.run()


def test_ranked_on_the_mean(tmp_path: Path) -> None:
    """Not on the luckiest seed; a point with a non-finite seed has no mean, an infeasible one comes last with its reason."""
    simulation, state = simulate(tmp_path)
    table = rows(state, simulation.sweep)
    assert [row.values["attention.d_proj"] for row in table] == [8, 4, 2, 64]
    assert [row.metrics["validation_loss"] for row in table] == [3.5, 5.0, None, None]
    assert table[0].loss_deviation == pytest.approx(math.sqrt(0.5)) and table[2].loss_deviation is None
    assert [row.front for row in table] == [True, False, False, False]
    assert table[3].status == "infeasible" and table[3].reason == "too wide"


def test_files(tmp_path: Path) -> None:
    """results.jsonl has a line per trial and infeasible point; best.json is the best point's config with its provenance."""
    simulation, state = simulate(tmp_path)
    folder = tmp_path / "sweep"
    for name in state.trials:
        (folder / "trials" / name).mkdir(parents=True)
        config = {
            "run": {"name": name, "dir": "x", "seed": 1},
            "logging": {"progress": False},
            "attention": {"d_proj": name},
        }
        (folder / "trials" / name / "config.json").write_text(json.dumps(config))
    table = write_results(state, simulation.sweep, folder)
    write_plots(table, state, simulation.sweep, folder)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 7 and [line["status"] for line in lines].count("infeasible") == 1
    best = json.loads((folder / "best.json").read_text())
    assert best["attention"] == {"d_proj": "p0002-s1"} and best["run"]["dir"] == "runs/test-best"
    assert best["provenance"]["trials"] == ["p0002-s1", "p0002-s2"] and best["provenance"]["values"] == {
        "attention.d_proj": 8
    }
    assert best["provenance"]["metrics"]["validation_loss"] == 3.5 and best["provenance"]["points_compared"] == 2
    for name in ("pareto.png", "parallel.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (folder / "tensorboard").iterdir()) == sorted(state.trials)


def test_hparams_hold_values_and_metrics(tmp_path: Path) -> None:
    """Read back from the event file: the point's values, the seed, and the last loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    simulation, state = simulate(tmp_path)
    table = rows(state, simulation.sweep)
    write_plots(table, state, simulation.sweep, tmp_path / "sweep")
    log = EventAccumulator(str(tmp_path / "sweep/tensorboard/p0002-s2"))
    log.Reload()
    content = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert {key: value.number_value for key, value in start.hparams.items()} == {"attention.d_proj": 8.0, "seed": 2.0}
    assert log.Scalars("sweep/validation_loss")[0].value == 4.0


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    """Killed while it wrote: whole lines stand, the next event gets a line of its own."""
    path = tmp_path / "events.jsonl"
    ledger = Ledger(path)
    ledger.append({"event": "session", "time": 1.0})
    ledger.close()
    whole = path.read_text()
    path.write_text(whole + '{"event": "rep')
    assert len(list(read_events(path))) == 1
    ledger = Ledger(path)
    ledger.append({"event": "session", "time": 2.0})
    ledger.close()
    assert [event["time"] for event in read_events(path)] == [1.0, 2.0]
    path.write_text("{broken\n" + whole)
    with pytest.raises(DataError, match="damaged at line 1"):
        list(read_events(path))


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "events.jsonl")
    with pytest.raises(DataError, match="held by a sweep that still runs"):
        Ledger(tmp_path / "events.jsonl")
    ledger.close()
    Ledger(tmp_path / "events.jsonl").close()


def test_metrics_are_the_objectives() -> None:
    """What can be asked for is what is reported."""
    from typing import get_args

    from spa_dist.sweep.schema import Metric

    assert set(METRICS) == set(get_args(Metric))
