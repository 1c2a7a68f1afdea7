"""The order of training and evaluation samples, and the batches in that order.

The order of training samples is a pure function of (seed, i) for the sample's number i in the whole run:

- There are C canonical streams; each training shard belongs to one of them. Sample i is element i // C of stream i % C.
- A stream's epoch goes through its shards in an order seeded by (seed, stream, epoch), and through the windows of each in
  an order seeded by (seed, shard, epoch); then the next epoch begins. Streams begin their epochs independently.
- Data-parallel rank r of R, where R divides C, gets the samples i ≡ r (mod R), that is the streams ≡ r (mod R): it never
  reads another rank's shards, and the samples of a global batch are the same for every R.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from math import lcm

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.order import permutation
from data_pipeline.prefetch import Prefetcher
from data_pipeline.windows import IGNORED_TARGET, ShardCache, count_windows, fill_window
from spa_dist.errors import DataError

Batch = tuple[np.ndarray, np.ndarray]


class TrainStream:
    """This rank's training samples, endless and in canonical order; see the module's text.

    sequence_length: tokens per sample. data_rank, data_size: place among the data-parallel ranks. workers: threads that
    prepare micro-batches ahead (0: none). Raises DataError when data_size does not divide the dataset's canonical streams.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str = "train",
        *,
        sequence_length: int,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        workers: int = 2,
    ):
        _check_place(sequence_length, data_rank, data_size)
        self._shards = dataset.split(split).shards
        streams = max(shard.stream for shard in self._shards) + 1
        if streams % data_size:
            raise DataError(
                f"{dataset.path}: the data-parallel size {data_size} does not divide its {streams} canonical streams: "
                f"choose a size that divides {streams}, or prepare the dataset again with --streams {lcm(streams, data_size)}"
            )
        self._eos_id = dataset.eos_id
        self._length = sequence_length
        self._seed = seed
        self._rank, self._size, self._streams = data_rank, data_size, streams
        self._workers = workers
        self._members: list[list[int]] = [[] for _ in range(streams)]
        for number, shard in enumerate(self._shards):
            self._members[shard.stream].append(number)
        self._windows = [count_windows(shard.tokens, sequence_length) for shard in self._shards]
        self._epoch_windows = [sum(self._windows[number] for number in members) for members in self._members]
        own = streams // data_size
        self._cache = ShardCache(lambda number: dataset.read_shard(self._shards[number]), own + 1)
        self._shard_order = lru_cache(maxsize=4 * own)(self._compute_shard_order)
        self._window_order = lru_cache(maxsize=4 * own)(self._compute_window_order)

    @property
    def epoch_samples(self) -> int:
        """Windows in the split: samples in one pass over it, over all ranks."""
        return sum(self._epoch_windows)

    def locate(self, sample: int) -> tuple[int, int]:
        """The (shard number, window) of sample number `sample` of the run."""
        element, stream = divmod(sample, self._streams)
        epoch, place = divmod(element, self._epoch_windows[stream])
        shards, starts = self._shard_order(stream, epoch)
        k = bisect_right(starts, place) - 1
        return shards[k], int(self._window_order(shards[k], epoch)[place - starts[k]])

    def batch(self, position: int, count: int) -> Batch:
        """This rank's samples among [position, position + count), in order: inputs, targets int64 [own samples, length]."""
        first = position + (self._rank - position) % self._size
        return self._gather(range(first, position + count, self._size))

    def micro_batches(self, position: int, *, global_size: int, micro_size: int) -> Prefetcher[Batch]:
        """Endless micro-batches of this rank, int64 [micro_size, length] each, from sample `position` on, prefetched.

        A step takes the next global_size samples of the run; this rank's share of them, in order, makes
        global_size / (data_size · micro_size) micro-batches. Close the result to stop its threads.
        """
        if global_size % (micro_size * self._size):
            raise ValueError(
                f"global_size {global_size} is not a multiple of micro_size {micro_size} × data_size {self._size}"
            )
        # Whatever the position, any R consecutive samples hold one of each rank: this rank's share of a step is the next
        # global_size / R of its own samples, and a micro-batch spans micro_size · R samples of the run.
        span = micro_size * self._size
        ahead = 2 * self._workers
        self._cache.reserve(self._streams // self._size + min(self._streams // self._size, (ahead + 1) * micro_size))
        return Prefetcher(lambda k: self.batch(position + k * span, span), workers=self._workers, ahead=ahead)

    def _gather(self, samples: range) -> Batch:
        inputs = np.empty((len(samples), self._length), np.int64)
        targets = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            shard, window = self.locate(sample)
            fill_window(self._cache.get(shard), window, self._eos_id, inputs[row], targets[row])
        return inputs, targets

    def _compute_shard_order(self, stream: int, epoch: int) -> tuple[list[int], list[int]]:
        members = self._members[stream]
        shards = [members[k] for k in permutation(len(members), "shards", self._seed, stream, epoch)]
        starts = [0]
        for shard in shards[:-1]:
            starts.append(starts[-1] + self._windows[shard])
        return shards, starts

    def _compute_window_order(self, shard: int, epoch: int) -> np.ndarray:
        return permutation(self._windows[shard], "windows", self._seed, shard, epoch)


class EvalStream:
    """Every window of a split once, in the same number of batches on each rank.

    Rank r of R reads the r-th of R consecutive runs of windows; rows that it lacks are padding (target -100). limit: at most
    this many windows in all, spread evenly over the split. `tokens` and `words` are what all ranks' windows hold together:
    the targets, and the words of the text they cover (with a limit, the split's words times the share of its targets).
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str = "validation",
        *,
        sequence_length: int,
        data_rank: int = 0,
        data_size: int = 1,
        limit: int | None = None,
    ):
        _check_place(sequence_length, data_rank, data_size)
        if limit is not None and limit < 1:
            raise ValueError(f"limit {limit} leaves nothing to evaluate: give at least 1, or None for the whole split")
        content = dataset.split(split)
        self._dataset, self._shards, self._length = dataset, content.shards, sequence_length
        places = [(k, w) for k, s in enumerate(self._shards) for w in range(count_windows(s.tokens, sequence_length))]
        if limit is not None and limit < len(places):
            places = [places[k * len(places) // limit] for k in range(limit)]
        self.windows = len(places)
        self.tokens = sum(min(sequence_length, self._shards[k].tokens - w * sequence_length) for k, w in places)
        self.words: float = content.words * self.tokens / content.tokens
        self._rows = -(-len(places) // data_size)
        self._places = places[data_rank * self._rows : (data_rank + 1) * self._rows]

    def batches(self, micro_size: int) -> Iterator[Batch]:
        """Yield inputs, targets int64 [micro_size, sequence_length]; ceil(windows / data_size / micro_size) of them."""
        if micro_size < 1:
            raise ValueError(f"micro_size {micro_size} must be at least 1")
        cache = ShardCache(lambda number: self._dataset.read_shard(self._shards[number]), 1)
        for start in range(0, self._rows, micro_size):
            inputs = np.full((micro_size, self._length), self._dataset.eos_id, np.int64)
            targets = np.full_like(inputs, IGNORED_TARGET)
            for row, (shard, window) in enumerate(self._places[start : start + micro_size]):
                fill_window(cache.get(shard), window, self._dataset.eos_id, inputs[row], targets[row])
            yield inputs, targets


def _check_place(sequence_length: int, data_rank: int, data_size: int) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length {sequence_length} must be at least 1")
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank {data_rank} is not one of the {data_size} data-parallel ranks")
