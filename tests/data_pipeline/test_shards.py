"""Every document and token is in the tars, and the index tells the truth about them; read back with plain tarfile."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.dataset import open_dataset
from data_pipeline.index import read_index
from data_pipeline.shards import MIN_STREAM_TOKENS, SplitWriter, TokenDocument
from tests.data_pipeline.support import read_json, read_tar
from tests.synthetic import sentences, write_dataset

EOS = 1


def write_split(folder: Path, lengths: list[int], *, streams: int, shard_tokens: int, dtype: str = "uint16"):
    folder.mkdir(parents=True)
    top = 2**16 if dtype == "uint16" else 2**32
    rng = np.random.default_rng(0)
    documents = [
        TokenDocument(f"doc/{k}.x é", rng.integers(2, top, n).astype(np.uint32).view(np.int32), n // 2, 3 * n)
        if dtype == "uint32"
        else TokenDocument(f"doc/{k}.x é", rng.integers(2, top, n).astype(np.int32), n // 2, 3 * n)
        for k, n in enumerate(lengths)
    ]
    writer = SplitWriter(folder, "train", streams=streams, shard_tokens=shard_tokens, dtype=dtype, eos_id=EOS)
    for document in documents:
        writer.write(document)
    return documents, *writer.finish()


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(3000, 9000)), min_size=1, max_size=40),
    streams=st.sampled_from([1, 2, 4, 6, 8]),
    shard_tokens=st.sampled_from([1, 5000, 20000]),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_split_holds_every_document_once(tmp_path_factory, lengths, streams, shard_tokens, dtype) -> None:
    folder = tmp_path_factory.mktemp("split") / "s"
    documents, split, used = write_split(folder, lengths, streams=streams, shard_tokens=shard_tokens, dtype=dtype)
    assert sorted(path.name for path in folder.iterdir()) == [shard.file for shard in split.shards]
    found, order = {}, {}
    for shard in split.shards:
        content = read_tar(folder / shard.file, {"uint16": "<u2", "uint32": "<u4"}[dtype])
        assert (shard.documents, shard.tokens) == (len(content), sum(len(ids) for _, _, ids in content))
        assert shard.words == sum(meta["words"] for _, meta, _ in content)
        assert shard.bytes == sum(meta["bytes"] for _, meta, _ in content)
        data = (folder / shard.file).read_bytes()
        assert (shard.file_bytes, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert sum(len(ids) for _, _, ids in content[:-1]) < shard_tokens, "a shard is closed as soon as it is full"
        keys = [key for key, _, _ in content]
        assert keys == sorted(keys)
        for key, meta, ids in content:
            assert key not in found
            found[key], order[int(key)] = (meta, ids), shard.stream
    top = 0xFFFF if dtype == "uint16" else 0xFFFFFFFF
    expected = [
        ({"id": d.id, "tokens": n + 1, "words": n // 2, "bytes": 3 * n}, [int(k) & top for k in d.ids] + [EOS])
        for d, n in zip(documents, lengths)
    ]
    assert [found[key] for key in sorted(found)] == expected
    check_streams(lengths, streams, used, [order[k] for k in range(len(lengths))])


def check_streams(lengths: list[int], wanted: int, used: int, streams: list[int]) -> None:
    """The number of streams is the largest possible divisor, and each document went to the least loaded one."""
    waiting = tokens = 0
    for length in lengths:
        waiting, tokens = waiting + 1, tokens + length + 1
        if min(waiting, tokens // MIN_STREAM_TOKENS) >= wanted:
            break
    possible = max(1, min(wanted, waiting, tokens // MIN_STREAM_TOKENS))
    assert used == max(n for n in range(1, possible + 1) if wanted % n == 0)
    assert set(streams) == set(range(used))
    loads = [0] * used
    for length, stream in zip(lengths, streams):
        assert loads[stream] == min(loads)
        loads[stream] += length + 1


def test_empty_split_has_no_shards(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "test", streams=4, shard_tokens=10, dtype="uint16", eos_id=EOS)
    split, streams = writer.finish()
    assert (split.shards, streams, list(tmp_path.iterdir())) == ((), 0, [])


def test_dataset_is_the_encoded_corpus(folder: Path) -> None:
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    index = read_json(folder)
    assert index["canonical_streams"] == dataset.canonical_streams == 8
    for number, (split, count) in enumerate((("train", 1200), ("validation", 120))):
        texts = sentences(number + 1, count)
        shards = index["splits"][split]["shards"]
        tars = {shard["file"]: read_tar(folder / shard["file"]) for shard in shards}
        documents = {meta["id"]: ids for content in tars.values() for _, meta, ids in content}
        assert sum(len(content) for content in tars.values()) == len(documents) == count
        for k, text in enumerate(texts):
            ids = documents[f"{split}-{k}"]
            assert ids[-1] == tokenizer.eos_id
            assert ids[:-1] == tokenizer.encode(text).tolist()
            assert tokenizer.decode(ids) == text
        totals = index["splits"][split]
        assert totals["documents"] == count
        assert totals["tokens"] == sum(map(len, documents.values()))
        assert totals["words"] == sum(len(text.split()) for text in texts)
        assert totals["bytes"] == sum(len(text.encode()) for text in texts)
        for shard, entry in zip(dataset.splits[split].shards, shards):
            sequence = dataset.read_shard(shard)
            assert sequence.dtype == np.uint16
            assert sequence.tolist() == [tokenizer.eos_id] + [k for _, _, ids in tars[entry["file"]] for k in ids]


def test_same_corpus_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_dataset(tmp_path / "again")
    files = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in again.iterdir()) == files
    for name in files:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def test_index_reads_back_what_was_written(folder: Path, tmp_path: Path) -> None:
    index = read_index(folder)
    index.write(tmp_path)
    assert read_index(tmp_path) == index
    assert (tmp_path / "index.json").read_bytes() == (folder / "index.json").read_bytes()


@pytest.mark.parametrize("shard_tokens", [1, 10**9])
def test_shard_size_changes_files_not_streams(tmp_path: Path, shard_tokens: int) -> None:
    _, split, used = write_split(tmp_path / "a", [5000] * 12, streams=4, shard_tokens=shard_tokens)
    assert used == 4
    assert len(split.shards) == (12 if shard_tokens == 1 else 4)
