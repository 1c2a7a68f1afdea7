"""The order of samples, simulated over whole epochs and every data-parallel size against windows rebuilt from the tars."""

import hashlib
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.dataset import Dataset, open_dataset
from data_pipeline.order import permutation
from data_pipeline.stream import EvalStream, TrainStream
from spa_dist.errors import DataError
from tests.data_pipeline.support import count_rows, read_json, rows_of, windows_of

STREAMS, LENGTH = 8, 100
SIZES = (1, 2, 4, 8)


def stream_of(
    folder: Path, rank: int = 0, size: int = 1, *, seed: int = 3, workers: int = 0, length: int = LENGTH
) -> TrainStream:
    return TrainStream(
        open_dataset(folder), sequence_length=length, seed=seed, data_rank=rank, data_size=size, workers=workers
    )


@pytest.fixture(scope="module")
def windows(folder: Path):
    return windows_of(folder, "train", LENGTH)


@pytest.fixture(scope="module")
def by_stream(folder: Path, windows):
    """Stream -> {shard file -> windows}."""
    shards = read_json(folder)["splits"]["train"]["shards"]
    streams = [{s["file"]: windows[s["file"]] for s in shards if s["stream"] == c} for c in range(STREAMS)]
    assert all(len(own) > 1 for own in streams), "an order of shards needs more than one"
    return streams


@pytest.fixture(scope="module")
def canonical(folder: Path, by_stream):
    """Samples of one rank, past two epochs of the longest stream."""
    longest = max(sum(map(len, own.values())) for own in by_stream)
    return rows_of(stream_of(folder).batch(0, STREAMS * (2 * longest + 7)))


def test_each_stream_epoch_is_every_window_once(by_stream, canonical) -> None:
    for c, own in enumerate(by_stream):
        size = sum(map(len, own.values()))
        elements = canonical[c::STREAMS]
        epochs = [elements[:size], elements[size : 2 * size]]
        for epoch in epochs:
            assert Counter(epoch) == count_rows(own)
            left = dict(own)
            while left:  # shard after shard
                fits = [f for f, rows in left.items() if Counter(epoch[: len(rows)]) == Counter(rows)]
                assert fits, "the windows of a shard stand together"
                epoch = epoch[len(left.pop(fits[0])) :]
        assert epochs[0] != epochs[1]
        assert epochs[0] != [row for rows in own.values() for row in rows], "shuffled"


def test_epoch_samples_counts_the_windows(folder: Path, windows) -> None:
    assert stream_of(folder).epoch_samples == sum(map(len, windows.values()))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_give_the_canonical_order(folder: Path, canonical, size: int, monkeypatch) -> None:
    shards = read_json(folder)["splits"]["train"]["shards"]
    read = Dataset.read_shard
    opened: set[str] = set()

    def watched(self, shard):
        opened.add(shard.file)
        return read(self, shard)

    monkeypatch.setattr(Dataset, "read_shard", watched)
    union: list = [None] * len(canonical)
    for rank in range(size):
        opened.clear()
        rows = rows_of(stream_of(folder, rank, size).batch(0, len(canonical)))
        union[rank::size] = rows
        assert opened == {s["file"] for s in shards if s["stream"] % size == rank}
    assert union == canonical


@pytest.mark.parametrize("size", SIZES)
def test_any_position_resumes_the_same_order(folder: Path, canonical, size: int) -> None:
    rng = random.Random(size)
    for _ in range(12):
        position, count, rank = rng.randrange(len(canonical) - 60), rng.randrange(60), rng.randrange(size)
        expected = [canonical[i] for i in range(position, position + count) if i % size == rank]
        assert rows_of(stream_of(folder, rank, size).batch(position, count)) == expected


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_are_the_order_for_any_workers(folder: Path, canonical, size: int, workers: int) -> None:
    global_size, micro, position, steps = 24, 3, 13, 20
    for rank in range(size):
        source = stream_of(folder, rank, size, workers=workers)
        with source.micro_batches(position, global_size=global_size, micro_size=micro) as batches:
            for step in range(steps):
                first = position + step * global_size
                own = [canonical[i] for i in range(first, first + global_size) if i % size == rank]
                got = [rows_of(next(batches)) for _ in range(global_size // micro // size)]
                assert all(len(rows) == micro for rows in got)
                assert [row for rows in got for row in rows] == own


def test_closing_stops_the_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    batches = stream_of(folder, workers=3).micro_batches(0, global_size=8, micro_size=2)
    next(batches)
    assert set(threading.enumerate()) > before
    batches.close()
    assert set(threading.enumerate()) == before
    assert list(batches) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_s_error_reaches_the_consumer(folder: Path, tmp_path: Path, workers: int) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    source = stream_of(copy, workers=workers)
    lost = source._shards[source.locate(9)[0]].file
    (copy / lost).unlink()
    with source.micro_batches(0, global_size=8, micro_size=1) as batches, pytest.raises(DataError, match=lost):
        for _ in range(10):
            next(batches)


def test_seed_changes_the_order_and_length_the_windows(folder: Path, canonical) -> None:
    assert rows_of(stream_of(folder, seed=4).batch(0, 200)) != canonical[:200]
    for length in (1, 7, 5000):
        source = stream_of(folder, length=length)
        expected = windows_of(folder, "train", length)
        if length == 5000:  # each shard of the dataset fits in one padded window
            rows = rows_of(source.batch(0, STREAMS * 20))
            assert {row for rows_ in expected.values() for row in rows_} == set(rows)
        assert source.epoch_samples == sum(map(len, expected.values()))


@settings(deadline=None, max_examples=50)
@given(length=st.integers(0, 300), key=st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=5)), max_size=4))
def test_permutation_is_the_stable_sort_of_splitmix64(length: int, key: list) -> None:
    mask = 2**64 - 1
    state = int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")
    keys = []
    for _ in range(length):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        keys.append(z ^ (z >> 31))
    assert permutation(length, *key).tolist() == sorted(range(length), key=keys.__getitem__)


def test_size_that_does_not_divide_the_streams_is_refused(folder: Path) -> None:
    for size in (3, 5, 16):
        with pytest.raises(DataError, match=rf"size {size} does not divide its 8.*--streams {np.lcm(8, size)}"):
            stream_of(folder, 0, size)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="data_rank"):
            stream_of(folder, rank, size)
    with pytest.raises(ValueError, match="multiple"):
        stream_of(folder, 0, 2).micro_batches(0, global_size=6, micro_size=2)
    with pytest.raises(DataError, match=r"'test'.*train, validation"):
        EvalStream(open_dataset(folder), "test", sequence_length=8)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("micro", [1, 5])
def test_evaluation_covers_each_window_once(folder: Path, split: str, size: int, micro: int) -> None:
    expected = windows_of(folder, split, LENGTH)
    totals = read_json(folder)["splits"][split]
    padding = tuple([-100] * LENGTH)
    found: Counter = Counter()
    batches = set()
    for rank in range(size):
        source = EvalStream(open_dataset(folder), split, sequence_length=LENGTH, data_rank=rank, data_size=size)
        own = [rows_of(batch) for batch in source.batches(micro)]
        assert all(len(rows) == micro for rows in own)
        batches.add(len(own))
        found.update(row for rows in own for row in rows if row[1] != padding)
        assert (source.tokens, source.words) == (totals["tokens"], totals["words"])
    assert found == count_rows(expected)
    assert len(batches) == 1


@pytest.mark.parametrize("limit", [1, 2, 10, 10**6])
def test_evaluation_limit_is_a_spread_subset(folder: Path, limit: int) -> None:
    everything = count_rows(windows_of(folder, "validation", LENGTH))
    found: Counter = Counter()
    for rank in range(3):
        source = EvalStream(open_dataset(folder), sequence_length=LENGTH, data_rank=rank, data_size=3, limit=limit)
        found.update(row for batch in source.batches(4) for row in rows_of(batch) if set(row[1]) != {-100})
    assert sum(found.values()) == min(limit, sum(everything.values()))
    assert found <= everything
    assert source.tokens == sum(
        n for row, n in Counter(t for row in found.elements() for t in row[1]).items() if row != -100
    )
    totals = read_json(folder)["splits"]["validation"]
    assert source.words == pytest.approx(totals["words"] * source.tokens / totals["tokens"])
