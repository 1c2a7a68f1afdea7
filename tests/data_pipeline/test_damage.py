"""Damage of any kind ends in a DataError that names the file, before a wrong token is used."""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.dataset import Dataset, check_tokenizer, open_dataset
from data_pipeline.index import read_index
from data_pipeline.stream import EvalStream, TrainStream
from data_pipeline.tokenizer import train_tokenizer
from spa_dist.errors import DataError
from tests.data_pipeline.support import read_json
from tests.synthetic import sentences

SHARD = "train-00002.tar"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def read_all(folder: Path) -> None:
    """What a run does: open, one training epoch, one evaluation."""
    dataset = open_dataset(folder)
    dataset.tokenizer()
    train = TrainStream(dataset, sequence_length=100, seed=0, workers=0)
    train.batch(0, 2 * train.epoch_samples)
    list(EvalStream(dataset, sequence_length=100).batches(4))


def member_boundary(path: Path) -> int:
    with tarfile.open(path) as tar:
        return tar.getmembers()[20].offset


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def data_offset(path: Path) -> int:
    with tarfile.open(path) as tar:
        return next(member.offset_data for member in tar if member.name.endswith(".tokens"))


def pad(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 512)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "cut at a member": lambda path: path.write_bytes(path.read_bytes()[: member_boundary(path)]),
    "longer": pad,
    "token bit": lambda path: flip(path, data_offset(path)),
    "last bit": lambda path: flip(path, -1),
    "header": lambda path: flip(path, 150),
    "missing": Path.unlink,
    "another shard": lambda path: shutil.copy(path.with_name("train-00003.tar"), path),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


def test_whole_dataset_reads(copy: Path) -> None:
    read_all(copy)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [SHARD, "validation-00000.tar"])
def test_damaged_shard_is_named(copy: Path, kind: str, name: str) -> None:
    DAMAGE[kind](copy / name)
    with pytest.raises(DataError, match=name) as caught:
        read_all(copy)
    assert "\n" not in str(caught.value)


def test_sizes_are_checked_on_opening(copy: Path) -> None:
    DAMAGE["truncated"](copy / SHARD)
    with pytest.raises(DataError, match=SHARD):
        open_dataset(copy)


def test_index_of_other_counts_is_found_out(copy: Path) -> None:
    """A shard that lost documents, with size and hash of the index put right: the counts still tell."""
    path, content = copy / SHARD, read_json(copy)
    path.write_bytes(path.read_bytes()[: member_boundary(path)] + b"\0" * 1024)
    shard = next(s for s in content["splits"]["train"]["shards"] if s["file"] == SHARD)
    shard.update(file_bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    (copy / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"{SHARD}.*documents"):
        read_all(copy)


def test_another_or_missing_tokenizer_is_refused(copy: Path) -> None:
    path = copy / "tokenizer.model"
    path.write_bytes(train_tokenizer(sentences(9, 500), vocab_size=320).model)
    for use in (check_tokenizer, Dataset.tokenizer):
        with pytest.raises(DataError, match=r"tokenizer\.model.*not the tokenizer"):
            use(open_dataset(copy))
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        open_dataset(copy).tokenizer()


MISSING = object()


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["format"], "spa_dist.dataset/2"),
        (["format"], MISSING),
        (["canonical_streams"], 16),
        (["canonical_streams"], 4),
        (["canonical_streams"], 0),
        (["dtype"], "int8"),
        (["tokenizer", "eos_id"], -1),
        (["tokenizer", "eos_id"], 320),
        (["tokenizer", "vocab_size"], 70000),
        (["tokenizer", "vocab_size"], True),
        (["tokenizer", "file"], "../tokenizer.model"),
        (["tokenizer", "file"], "/etc/passwd"),
        (["tokenizer", "sha256"], "0"),
        (["tokenizer"], MISSING),
        (["splits"], []),
        (["splits", "train", "tokens"], 5),
        (["splits", "train", "words"], MISSING),
        (["splits", "train", "shards", 0, "documents"], 1),
        (["splits", "train", "shards", 0, "tokens"], 0),
        (["splits", "train", "shards", 0, "tokens"], 10.0),
        (["splits", "train", "shards", 0, "file"], "../x.tar"),
        (["splits", "train", "shards", 0, "file"], "train-00001.tar"),
        (["splits", "train", "shards", 0, "file"], None),
        (["splits", "train", "shards", 0, "sha256"], MISSING),
        (["source"], MISSING),
    ],
)
def test_index_that_contradicts_itself_is_refused(copy: Path, keys: list, value: object) -> None:
    content = read_json(copy)
    place = content
    for key in keys[:-1]:
        place = place[key]
    if value is MISSING:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    (copy / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"index\.json"):
        open_dataset(copy)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_changed_byte_of_the_index_is_handled(folder: Path, tmp_path_factory, data: st.DataObject) -> None:
    content = bytearray((folder / "index.json").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    target = tmp_path_factory.getbasetemp() / "changed"
    target.mkdir(exist_ok=True)
    (target / "index.json").write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    try:
        read_index(target)
    except DataError as error:
        assert "index.json" in str(error)


def test_missing_dataset_says_how_to_make_one(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"index\.json is missing.*prepare\.py"):
            open_dataset(place)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file"):
        open_dataset(tmp_path / "file")
