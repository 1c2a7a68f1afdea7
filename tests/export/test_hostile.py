"""Damaged and hostile checkpoints: named in one line, and nothing in them is executed."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.load import load_model
from spa_dist.export.manifest import find_checkpoint
from spa_dist.export.write import ExportOptions, write_export
from tests.export.synthetic_run import Run, make_run

WEIGHTS = "weights-tp01-dp001.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", {"attention.per": "head"}, tensor=2, data=2)


def refused(run: Run, word: str) -> None:
    with pytest.raises(CheckpointError, match=word) as caught:
        load_plain_model(open_checkpoint(run.folder))
    assert "\n" not in str(caught.value)


def test_truncated_flipped_and_missing_files(run: Run) -> None:
    path = run.checkpoint / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    refused(run, WEIGHTS)
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    refused(run, WEIGHTS)
    path.unlink()
    refused(run, WEIGHTS)
    path.write_bytes(content)
    load_plain_model(open_checkpoint(run.folder))


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.target,)


def test_pickled_code_does_not_run(run: Run, tmp_path: Path) -> None:
    """A file whose hash the manifest vouches for, and which runs code when unpickled; and the same as an export."""
    trace = tmp_path / "executed"
    pickle.loads(pickle.dumps(_Payload(trace)))
    assert trace.exists(), "the payload would do nothing"
    trace.unlink()
    (run.checkpoint / WEIGHTS).write_bytes(pickle.dumps(_Payload(trace)))
    run.commit()
    refused(run, "safetensors")
    good = make_run(tmp_path / "good")
    write_export(open_checkpoint(good.folder), tmp_path / "export", ExportOptions())
    torch.save({"embedding.weight": _Payload(trace)}, tmp_path / "export" / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(tmp_path / "export")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..", "a\\b", "weights\0"])
def test_files_outside_the_folder(run: Run, name: str) -> None:
    tree = run.manifest()
    tree["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    run.change_manifest(tree)
    refused(run, "not a file of the folder")
    tree = run.manifest() | {"files": {}}
    tree["tokenizer"]["file"] = name
    run.change_manifest(tree)
    refused(run, "damaged")


def rewrite(run: Run, change: Callable[[dict[str, torch.Tensor], dict[str, list[int]]], None]) -> None:
    """Change one file's fragments, and let the manifest vouch for it."""
    path = run.checkpoint / WEIGHTS
    with safetensors.safe_open(path, "pt") as file:
        places = json.loads(file.metadata()["fragments"])
    tensors = safetensors.torch.load_file(path)
    change(tensors, places)
    safetensors.torch.save_file(tensors, path, metadata={"fragments": json.dumps(places)})
    run.commit()


NAME = "layers.0.mlp.up.weight"
CHANGES: dict[str, Callable[[dict[str, torch.Tensor], dict[str, list[int]]], None]] = {
    "absent": lambda tensors, places: (tensors.pop(NAME), places.pop(NAME)),  # type: ignore[func-returns-value]
    "overlapping": lambda tensors, places: places.update({NAME: [places[NAME][0] - 1, places[NAME][1]]}),
    "negative start": lambda tensors, places: places.update({NAME: [-5, places[NAME][1]]}),
    "past the end": lambda tensors, places: places.update({NAME: [10**9, places[NAME][1]]}),
    "another length": lambda tensors, places: places.update({NAME: [places[NAME][0], 3]}),
    "no place": lambda tensors, places: places.pop(NAME),
    "unknown name": lambda tensors, places: (tensors.update(x=torch.ones(2)), places.update(x=[0, 2])),  # type: ignore[func-returns-value]
    "bf16": lambda tensors, places: tensors.update({NAME: tensors[NAME].bfloat16()}),
    "two dimensions": lambda tensors, places: tensors.update({NAME: tensors[NAME][None]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fragments_that_do_not_tile(run: Run, change: str) -> None:
    rewrite(run, CHANGES[change])
    refused(run, "fragment")


@pytest.mark.parametrize(
    "header", [b"", b"[]", b'{"x": 1}', b"{" * 100_000, b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}']
)
def test_headers_that_make_no_sense(run: Run, header: bytes) -> None:
    for length in (len(header), 2**63, len(header) + 1):
        (run.checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", length) + header + b"\0" * 4)
        run.commit()
        refused(run, WEIGHTS)


def test_copies_that_differ(run: Run) -> None:
    """A replicated bias that one tensor-parallel rank trained apart."""
    rewrite(run, lambda tensors, places: tensors.update({"norm.bias": tensors["norm.bias"] + 0.5}))
    refused(run, "different copies of norm.bias")


@pytest.mark.parametrize("name", ["manifest.json", WEIGHTS])
def test_pipes_and_devices_are_not_read(run: Run, name: str) -> None:
    """A pipe that nobody writes to, and a device that never ends: a reader would stay for ever."""
    path = run.checkpoint / name
    path.unlink()
    os.mkfifo(path)
    refused(run, "no checkpoint" if name == "manifest.json" else "not a file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(run, "no checkpoint" if name == "manifest.json" else "not a file")


SIZES = [{"num_layers": 2**30}, {"hidden_size": 2**30, "vocab_size": 2**30}, {"num_heads": 2**30, "head_dim": 2**30}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_absurd_sizes_cost_nothing(run: Run, sizes: dict[str, int]) -> None:
    tree = run.manifest()
    tree["config"]["model"] |= sizes
    run.change_manifest(tree)
    refused(run, "does not make a model")


def test_memory_is_taken_only_for_what_the_files_hold(run: Run) -> None:
    """Config and layout table agree on 100 GB of feed-forward weights, and the files hold a few kB of them."""
    tree = run.manifest()
    tree["config"]["model"]["ffn_hidden_size"] = 2**30
    for name, entry in tree["layout"].items():
        if "mlp.up" in name:
            entry["shape"][0] = 2**30
        elif "mlp.down.weight" in name:
            entry["shape"][1] = 2**30
    run.change_manifest(tree)
    refused(run, "mlp.up.weight do not make a whole")


def test_an_export_that_points_elsewhere(run: Run, tmp_path: Path) -> None:
    """An index that names a file outside, a header of 2^60 bytes, and a config.json that is a device."""
    output = tmp_path / "export"
    write_export(open_checkpoint(run.folder), output, ExportOptions("safetensors", max_shard_bytes=6_000))
    index = output / "model.safetensors.index.json"
    shard, content = next(output.glob("model-00001*")), index.read_text()
    (tmp_path / "outside.safetensors").write_bytes(shard.read_bytes())
    index.write_text(content.replace(shard.name, "../outside.safetensors"))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_model(output)
    index.write_text(content)
    load_model(output)
    shard.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(output)
    (output / "config.json").unlink()
    for content in ("{", "[" * 100_000, "[]", '{"format": "spa_dist.export/1", "vocab_size": 1}'):
        (output / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_model(output)
    (output / "config.json").unlink()
    (output / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"config\.json .* no file of JSON"):
        load_model(output)


def test_a_checkpoint_that_goes_away_or_is_being_written(run: Run, tmp_path: Path) -> None:
    """The trainer removes old checkpoints and writes new ones while a conversion runs."""
    newer = run.checkpoint.with_name("step_00000020")
    shutil.copytree(run.checkpoint, newer)
    (newer / "manifest.json").unlink()
    checkpoint = open_checkpoint(run.folder)
    assert checkpoint.manifest.step == 10, "the newer one is not committed yet"
    shutil.rmtree(run.checkpoint)
    with pytest.raises(CheckpointError, match="cannot be read"):
        write_export(checkpoint, tmp_path / "place" / "out", ExportOptions())
    assert list((tmp_path / "place").iterdir()) == []


MISSING = object()
JUNK = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.floats(), st.just([]), st.just({}), st.just(MISSING)
)


def places_of(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node that a reader looks at."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    paths = [prefix] if prefix else []
    for key, value in items:
        if prefix or key in ("format", "step", "tokens", "parallel", "layout", "files", "tokenizer", "config"):
            paths += places_of(value, (*prefix, key))
    return paths


@settings(max_examples=60)
@given(st.data())
def test_any_junk_in_a_manifest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever stands anywhere in a manifest, the answer is a model or one line, never another exception."""
    if "run" not in _SHARED:
        _SHARED["run"] = make_run(tmp_path_factory.mktemp("junk") / "run", tensor=2)
        _SHARED["tree"] = json.dumps(_SHARED["run"].manifest())
    run, tree = _SHARED["run"], json.loads(_SHARED["tree"])
    *path, last = data.draw(st.sampled_from(places_of(tree)))
    node = tree
    for key in path:
        node = node[key]
    junk = data.draw(JUNK)
    if junk is MISSING:
        del node[last]
    else:
        node[last] = junk
    run.change_manifest(tree)
    try:
        load_plain_model(open_checkpoint(run.folder))
    except CheckpointError as error:
        assert "\n" not in str(error)


_SHARED: dict[str, Any] = {}


def test_which_checkpoint_a_path_means(run: Run, tmp_path: Path) -> None:
    newer = run.checkpoint.with_name("step_00000200")
    newer.mkdir()
    assert find_checkpoint(run.folder) == run.checkpoint, "a folder without a manifest is no checkpoint"
    (newer / "manifest.json").write_text("{")
    assert find_checkpoint(run.folder) == find_checkpoint(run.folder / "checkpoints") == newer
    for name in ("10", "step_10", "step_00000010", "checkpoints/step_00000010"):
        assert find_checkpoint(run.folder / name) == run.checkpoint
    refused(run, "not JSON")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(run.folder / "30")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(tmp_path / "nowhere")
