"""The folder that a conversion leaves: whole or absent, readable by others' tools, nothing of the user's replaced."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from spa_dist.errors import CheckpointError
from spa_dist.export import model as model_module
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import PlainModel
from spa_dist.export.write import FORMATS, ExportOptions, write_export
from tests.distributed import ROOT
from tests.export.synthetic_run import PADDING, Run, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", {"model.tie_embeddings": False}, tensor=2, data=2)


def test_safetensors_are_the_packages_own(run: Run, tmp_path: Path) -> None:
    """What is written here reads back with the safetensors package, shard by shard, within the size asked for."""
    limit = 6_000
    written = write_export(
        open_checkpoint(run.folder), tmp_path / "out", ExportOptions("safetensors", max_shard_bytes=limit)
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    loaded = {}
    for name in sorted(set(index["weight_map"].values())):
        part = safetensors.torch.load_file(tmp_path / "out" / name)
        assert sum(tensor.nbytes for tensor in part.values()) <= limit or len(part) == 1
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        loaded |= part
    expected = load_plain_model(open_checkpoint(run.folder)).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    assert written.keys() == {path.name for path in (tmp_path / "out").iterdir()}


def test_pytorch_file_holds_no_padding_and_no_tie_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = write_export(open_checkpoint(run.folder), tmp_path / "out", ExportOptions())
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert "head.weight" not in state and state["embedding.weight"].shape == (61, 24)
    assert all(float(tensor.abs().max()) < PADDING for tensor in state.values())
    size = sum(tensor.nbytes for tensor in state.values())
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}.values()) == size
    assert written["model.pt"] < size + 1000 * len(state)


def test_the_model_file_works_alone(run: Run, tmp_path: Path) -> None:
    """Copied to a machine with torch and nothing of this project, it loads and computes the same."""
    write_export(open_checkpoint(run.folder), tmp_path / "out", ExportOptions())
    shutil.copy(model_module.__file__, tmp_path / "copied.py")
    program = (
        "import sys; sys.path.insert(0, '.'); import torch, copied\n"
        "model = copied.PlainModel.from_folder('out')\n"
        "print(copied.generate(model, [[3, 4], [5]], max_new_tokens=5))\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('spa_dist', 'deepspeed', 'megatron', 'pydantic')))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    tokens, modules = done.stdout.splitlines()
    model = PlainModel.from_folder(tmp_path / "out")
    assert json.loads(tokens) == model_module.generate(model, [[3, 4], [5]], max_new_tokens=5)
    assert modules == "[]"


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_write_that_fails_leaves_nothing(run: Run, tmp_path: Path, file_format: str) -> None:
    """The system refuses files above a size, as a full disk does: one line, exit code 2, no output, no debris."""
    (tmp_path / "place").mkdir()
    program = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    output = tmp_path / "place" / "out"
    command = [
        "tools/convert_checkpoint.py",
        "--checkpoint",
        str(run.folder),
        "--output",
        str(output),
        "--format",
        file_format,
    ]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "cannot be written" in done.stderr
    assert list((tmp_path / "place").iterdir()) == []


def test_force_replaces_an_export_and_nothing_else(run: Run, tmp_path: Path) -> None:
    checkpoint, output = open_checkpoint(run.folder), tmp_path / "out"
    write_export(checkpoint, output, ExportOptions())
    with pytest.raises(CheckpointError, match="--force"):
        write_export(checkpoint, output, ExportOptions())
    write_export(checkpoint, output, ExportOptions("safetensors"), force=True)
    assert not (output / "model.pt").exists()
    kept = [
        output / "notes.txt",
        output / "child" / "a.txt",
        tmp_path / "mine" / "a.txt",
        tmp_path / "other" / "config.json",
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
        with pytest.raises(CheckpointError, match="choose another --output"):
            write_export(checkpoint, output if output in path.parents else path.parent, ExportOptions(), force=True)
        assert path.read_text() == "precious"
        if output in path.parents:
            path.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other", "out", "run"], "nothing half-written stays"


def test_another_tokenizer_is_refused(run: Run, tmp_path: Path) -> None:
    (run.folder / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(CheckpointError, match="tokenizer"):
        write_export(open_checkpoint(run.folder), tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


def test_an_export_that_was_tampered_with(run: Run, tmp_path: Path) -> None:
    """Missing, additional and misshapen weights, and impossible configs, are refused in one line."""
    output = tmp_path / "out"
    write_export(open_checkpoint(run.folder), output, ExportOptions())
    state = torch.load(output / "model.pt", weights_only=True)
    tampered = [
        {name: tensor for name, tensor in state.items() if name != "norm.bias"},
        state | {"more": torch.ones(2)},
        state | {"norm.bias": torch.ones(3)},
        state | {"norm.bias": torch.ones(24, dtype=torch.int64)},
    ]
    for weights in tampered:
        torch.save(weights, output / "model.pt")
        with pytest.raises(ValueError, match="weight"):
            PlainModel.from_folder(output)
    torch.save(state, output / "model.pt")
    tree = json.loads((output / "config.json").read_text())
    for change in (
        {"num_layers": 10**12},
        {"num_heads": 3},
        {"bias": 1},
        {"logit_scale": -1.0},
        {"positions": "x"},
        {"head_dim": 8},
    ):
        (output / "config.json").write_text(json.dumps(tree | change))
        with pytest.raises(ValueError, match="config"):
            PlainModel.from_folder(output)


def test_a_shard_size_for_one_file_is_refused() -> None:
    """By the name that was typed, before anything is read."""
    command = ["tools/convert_checkpoint.py", "--checkpoint", "nowhere", "--output", "out", "--max-shard-size", "1GB"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--max-shard-size has no effect on --format pytorch" in done.stderr.splitlines()[-1]
