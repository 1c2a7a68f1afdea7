"""Every mistake in a sweep config is one line with the key and the way out, before Ray is even imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spa_dist.config import config_from_dict
from spa_dist.config.load import CONFIG_FOLDER, dotted_keys
from spa_dist.config.midrun import MID_RUN_KEYS
from spa_dist.sweep.driver import check_folder, plan_sweep
from spa_dist.sweep.load import load_sweep
from spa_dist.sweep.points import Points
from tests.distributed import ROOT
from tests.sweep.support import STEP_TOKENS, error_of, sweep_tree
from tests.synthetic import write_dataset

PBT = {"name": "pbt", "interval_tokens": 1024}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"spaces": {}}, "unknown key spaces; did you mean space?"),
    ({"space": {}}, "space is empty"),
    ({"space": {"attention.d_proj": {"grid": []}}}, "space.attention.d_proj.grid is empty"),
    ({"space": {"attention.d_proj": {}}}, "space.attention.d_proj: give one of grid, choice, uniform and log_uniform, not none"),
    ({"space": {"attention.d_proj": {"grids": [4]}}}, "unknown key space.attention.d_proj.grids"),
    ({"space": {"attention.d_pro": {"grid": [4]}}}, "space.attention.d_pro: unknown key attention.d_pro; did you mean attention.d_proj?"),
    ({"space": {"attention.d_proj": {"grid": [4, "8"]}}}, "space.attention.d_proj: '8' is no value of attention.d_proj"),
    ({"space": {"optimizer.lr": {"uniform": [-1, 1]}}, "search": {"method": "random", "points": 2}}, "space.optimizer.lr: -1 is no value"),
    ({"space": {"attention": {"grid": [4]}}}, "space.attention: attention is a section"),
    ({"space": {"run.seed": {"grid": [4]}}}, "space.run.seed: run.seed is set by seeds"),
    ({"set": {"run.steps": 4}}, "set.run.steps: run.steps is set by trial.tokens"),
    ({"set": {"attention.d_proj": 4}}, "set.attention.d_proj: the space varies it"),
    ({"space": {"optimizer.lr": {"uniform": [0.1, 0.1]}}}, "space.optimizer.lr: uniform [0.1, 0.1] is empty"),
    ({"space": {"optimizer.lr": {"log_uniform": [0, 0.1]}}}, "space.optimizer.lr: log_uniform [0, 0.1]: both bounds must be above 0"),
    ({"space": {"optimizer.lr": {"uniform": [0.1, 0.2]}}}, "space.optimizer.lr: search.method=grid tries lists"),
    ({"search": {"method": "optuna", "points": 3}}, "space.attention.d_proj: search.method=optuna draws; write choice"),
    ({"search": {"method": "hyperopt"}}, "search: input tag 'hyperopt'"),
    ({"search": {"method": "random"}}, "search.points is missing"),
    ({"search": {"method": "grid", "points": 3}}, "unknown key search.points"),
    ({"scheduler": {"name": "asha", "reduction": 1}}, "scheduler.reduction: input should be greater than or equal to 2, not 1"),
    ({"scheduler": PBT}, "space.attention.d_proj: scheduler pbt hands weights from member to member"),
    ({"scheduler": PBT | {"interval_tokens": 1000}, "space": {"optimizer.lr": {"grid": [0.1]}}}, "scheduler.interval_tokens=1000 must be"),
    ({"scheduler": PBT, "space": {"optimizer.lr": {"grid": [0.1]}}, "seeds": [1, 2]}, "seeds [1, 2]: members of a population"),
    ({"seeds": [1, 1]}, "seeds [1, 1]: each seed once"),
    ({"objectives": ["loss"]}, "objectives.0: input should be"),
    ({"budget": {"gpu_hours": 3.0}}, "budget.gpu_hours: trial.gpus_per_worker is 0"),
    ({"trial": {"tokens": 2048, "report_tokens": 1000}}, "trial.report_tokens=1000 does not divide"),
    ({"trial": {"tokens": 2048, "report_tokens": 1024, "workers": 2, "gpus_per_worker": 0.5}}, "trial.gpus_per_worker=0.5 with 2"),
    ({"trial": {"tokens": 2048, "report_tokens": 1024, "workers": 8}}, "trial: a trial needs 8 × (1 CPU, 0 GPU), and the cluster has ("),
    ({"trial": {"tokens": 384, "report_tokens": 128}}, "space: not one of its 2 points can be trained; the first: trial.report_tokens=128"),
    ({"space": {"attention.d_proj": {"grid": [32, 64]}}}, "space: not one of its 2 points can be trained; the first: attention.d_proj=32"),
    ({"base": "spa_tinny"}, "config 'spa_tinny' not found"),
    ({"cluster": {"nodes": [{"cpus": 4, "count": 2}]}}, "cluster.nodes has several nodes"),
]  # fmt: skip
CONDITIONS: list[tuple[dict[str, Any], str]] = [
    ({"attention.pattern": ["block"]}, "attention.pattern is not a key of the space"),
    ({"attention.kind": ["sparse"]}, "attention.kind never is 'sparse'"),
    ({"optimizer.lr": [0.1]}, "optimizer.lr is a range"),
    ({"attention.block": [[4, 4]]}, "the conditions of attention.block wait for one another"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "synthetic")


def plan(tree: dict[str, Any], folder: Path) -> None:
    path = folder / "sweep.json"
    path.write_text(json.dumps(tree))
    plan_sweep(load_sweep(path))


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_one_line(changes: dict[str, Any], message: str, tmp_path: Path, data: Path) -> None:
    error = error_of(lambda: plan(sweep_tree(tmp_path, data, **changes), tmp_path))
    assert error.startswith(message), error


@pytest.mark.parametrize(("when", "message"), CONDITIONS)
def test_conditions(when: dict[str, Any], message: str, tmp_path: Path, data: Path) -> None:
    space = {
        "attention.kind": {"choice": ["spa", "dense"]},
        "optimizer.lr": {"uniform": [0.1, 0.2]},
        "attention.block": {"choice": [[4, 4]], "when": when},
    }
    tree = sweep_tree(tmp_path, data, space=space, search={"method": "random", "points": 2})
    assert message in error_of(lambda: plan(tree, tmp_path))


def test_overrides_reach_dotted_keys(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep_tree(tmp_path, data)))
    sweep = load_sweep(path, ['space.optimizer.lr={"grid": [0.1]}', "set.model.bias=false", "trial.workers=1", "name=other"])
    assert list(sweep.space) == ["attention.d_proj", "optimizer.lr"] and sweep.set == {"model.bias": False}
    assert (sweep.trial.workers, sweep.name) == (1, "other")


def test_a_trials_config(tmp_path: Path, data: Path) -> None:
    """Base, settings, point and seed together, evaluated by tokens; a config that loads again."""
    changes = {
        "set": {"batch.global_size": 16},
        "seeds": [7],
        "trial": {"tokens": 4096, "report_tokens": 1024, "workers": 2, "tensor": 2},
    }
    tree = sweep_tree(tmp_path, data, **changes)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(tree))
    config = Points(load_sweep(path)).config({"attention.d_proj": 4}, 7, "p0000-s7")
    assert (config.attention.d_proj, config.batch.global_size, config.parallel.tensor, config.run.seed) == (4, 16, 2, 7)
    assert (config.run.tokens, config.run.steps, config.evaluation.every, config.evaluation.patience) == (
        4096,
        None,
        2,
        None,
    )
    assert config.run_dir == str(tmp_path / "sweep/trials/p0000-s7")
    assert config_from_dict(config.model_dump(mode="json")) == config


def test_sparsity_warm_ups(tmp_path: Path, data: Path) -> None:
    """In tokens: the last pruning of a magnitude mask, three quarters of a run by default; λ's rise for gates; none for a fixed S."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep_tree(tmp_path, data, trial={"tokens": 4096, "report_tokens": 1024})))
    points = Points(load_sweep(path))

    def warmup(pattern: str, mask: dict[str, Any] | None) -> int:
        values: dict[str, Any] = {"attention.pattern": pattern} | ({"attention.mask": mask} if mask else {})
        found = points.examine(values)
        assert found["infeasible"] is None
        return found["warmup_tokens"]

    assert warmup("random", None) == 0
    assert warmup("learned", {"method": "magnitude", "magnitude": {}}) == 3072
    assert warmup("adaptive", {"method": "magnitude", "magnitude": {"last_step": 5}}) == 5 * STEP_TOKENS
    assert warmup("learned", {"method": "gumbel", "gumbel": {}, "l0_warmup_steps": 7}) == 7 * STEP_TOKENS
    assert warmup("learned", {"method": "none"}) == 0


def test_a_section_comes_before_what_is_in_it(tmp_path: Path, data: Path) -> None:
    """λ of a drawn mask, though the space names λ first."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep_tree(tmp_path, data)))
    mask = {"method": "gumbel", "gumbel": {}}
    values = {"attention.mask.l0_lambda": 0.5, "attention.mask": mask, "attention.pattern": "learned"}
    config = Points(load_sweep(path)).config(values, 1, "x")
    assert config.attention.mask is not None and config.attention.mask.l0_lambda == 0.5


def test_mid_run_keys_are_keys() -> None:
    """Each of them is in the run config."""
    assert set(MID_RUN_KEYS) <= set(dotted_keys())


def test_only_the_sweep_itself_is_resumed(tmp_path: Path, data: Path) -> None:
    """Not one with another space, not an empty folder; and what is there is not begun anew."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep_tree(tmp_path, data)))
    sweep, folder = load_sweep(path), tmp_path / "sweep"
    assert "holds no sweep to resume" in error_of(lambda: check_folder(sweep, folder, resume=True))
    folder.mkdir()
    (folder / "events.jsonl").write_text("")
    (folder / "sweep.json").write_text(json.dumps(sweep.model_dump(mode="json")))
    assert "already holds a sweep" in error_of(lambda: check_folder(sweep, folder, resume=False))
    check_folder(sweep, folder, resume=True)
    check_folder(load_sweep(path, ["budget.trials=1", "cluster.max_concurrent=1"]), folder, resume=True)
    changed = load_sweep(path, ['space.optimizer.lr={"grid": [0.1]}'])
    assert "space is not what the sweep" in error_of(lambda: check_folder(changed, folder, resume=True))


def test_the_command_says_one_line(tmp_path: Path, data: Path) -> None:
    """Exit code 2, that line, and no Ray."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep_tree(tmp_path, data, seads=[1])))
    command = [sys.executable, "launch/sweep.py", "--config", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sweep.py: error: unknown key seads; did you mean seeds?\n"


@pytest.mark.parametrize("name", ["sweep_dprime", "sweep_sparsity", "sweep_smoke"])
def test_shipped_sweeps(name: str, data: Path) -> None:
    """Each loads, and its trial fits the nodes that it names; the data stands for the one on the cluster."""
    sweep = load_sweep(CONFIG_FOLDER / f"{name}.json", [f'set.data.path="{data}"'])
    points, slots = plan_sweep(sweep)
    assert slots and points.seeds
    if name == "sweep_dprime":
        assert sweep.space["attention.d_proj"].grid == [16, 32, 48, 64, 96, 128]
        assert points.config({"attention.d_proj": 16}, 1, "probe").model.head_dim == 128


def test_only_this_room_imports_ray() -> None:
    """And loading a sweep config imports it neither."""
    importers = {
        path.relative_to(ROOT).parts[:2]
        for folder in ("spa_dist", "data_pipeline", "launch", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if any(line.strip().startswith(("import ray", "from ray")) for line in path.read_text().splitlines())
    }
    assert importers == {("spa_dist", "sweep")}
    code = "import sys, spa_dist.sweep.load; print({'ray', 'torch', 'optuna', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
