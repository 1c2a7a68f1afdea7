"""The order over 64 streams, for every world that divides them; and that a stream decodes a shard once per epoch."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.dataset import Dataset
from data_pipeline.index import Index, Shard, Split
from data_pipeline.stream import TrainStream

STREAMS, LENGTH = 64, 32


class CountingDataset(Dataset):
    """A dataset whose shards are made up when they are read: token k of shard s is s * 1000 + k."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        streams = [*range(STREAMS), *rng.integers(0, STREAMS, 130).tolist()]
        tokens = rng.integers(1, 700, len(streams)).tolist()
        shards = [Shard(f"{k}", c, 1, n, 1, 1, 1, "") for k, (c, n) in enumerate(zip(streams, tokens))]
        super().__init__(
            Path("made-up"), Index({"train": Split("train", tuple(shards))}, "", "", 2**20, 1, "uint32", STREAMS)
        )
        self.reads: Counter[str] = Counter()

    def read_shard(self, shard: Shard) -> np.ndarray:
        self.reads[shard.file] += 1
        return np.arange(shard.tokens + 1, dtype=np.uint32) + 1000 * int(shard.file)


@pytest.fixture(scope="module")
def dataset() -> CountingDataset:
    return CountingDataset(0)


def stream_of(dataset: Dataset, rank: int = 0, size: int = 1, workers: int = 0) -> TrainStream:
    return TrainStream(dataset, sequence_length=LENGTH, seed=5, data_rank=rank, data_size=size, workers=workers)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_every_world_reads_the_canonical_order(dataset: CountingDataset, size: int) -> None:
    count = 64 * 60
    canonical, _ = stream_of(dataset).batch(0, count)
    own_shards: set[str] = set()
    for rank in range(size):
        dataset.reads.clear()
        inputs, _ = stream_of(dataset, rank, size).batch(0, count)
        assert np.array_equal(inputs, canonical[rank::size])
        assert not own_shards & dataset.reads.keys(), "two ranks read one shard"
        own_shards |= dataset.reads.keys()
        assert all(dataset.index.splits["train"].shards[int(file)].stream % size == rank for file in dataset.reads)


def test_a_stream_epoch_is_each_window_of_its_shards_once(dataset: CountingDataset) -> None:
    source = stream_of(dataset)
    shards = dataset.splits["train"].shards
    for stream in range(STREAMS):
        windows = Counter((k, w) for k, s in enumerate(shards) if s.stream == stream for w in range(-(-s.tokens // LENGTH)))
        size = sum(windows.values())
        for epoch in range(3):
            found = [source.locate((epoch * size + element) * STREAMS + stream) for element in range(size)]
            assert Counter(found) == windows


def visits(source: TrainStream, size: int, reach: int) -> int:
    """How often rank 0's streams turn to another shard within the first `reach` samples."""
    counts: Counter[int] = Counter()
    for stream in range(0, STREAMS, size):
        own = [source.locate(sample)[0] for sample in range(stream, reach, STREAMS)]
        counts.update(shard for k, shard in enumerate(own) if k == 0 or own[k - 1] != shard)
    assert max(counts.values()) > 1, "more than an epoch"
    return sum(counts.values())


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("size", [1, 8])
def test_a_shard_is_decoded_once_per_epoch(size: int, workers: int) -> None:
    dataset = CountingDataset(1)
    source = stream_of(dataset, 0, size, workers)
    micro, steps = 8, 400
    with source.micro_batches(0, global_size=micro * size, micro_size=micro) as batches:
        for _ in range(steps):
            next(batches)
    assert sum(dataset.reads.values()) <= visits(source, size, (steps + 2 * workers) * micro * size)
    kept = len(source._cache._entries)
    assert kept <= 2 * (STREAMS // size) + 1, "the cache is bounded by the streams, not the dataset"


@pytest.mark.parametrize("size", [1, 8])
def test_batches_decode_a_shard_once_per_epoch_too(size: int) -> None:
    dataset = CountingDataset(1)
    source = stream_of(dataset, 0, size)
    reach = 3200 * size
    for position in range(0, reach, 40):
        source.batch(position, 40)
    assert sum(dataset.reads.values()) <= visits(source, size, reach)
    assert len(source._cache._entries) <= STREAMS // size + 1
