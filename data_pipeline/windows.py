"""Windows of a shard: how a token sequence is cut into samples, and a bounded cache of the sequences in use."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

IGNORED_TARGET = -100
"""The target of padding: no loss is computed there (PyTorch's `ignore_index`)."""


def count_windows(tokens: int, sequence_length: int) -> int:
    """Windows of a shard with `tokens` targets; the last one may be padded."""
    return -(-tokens // sequence_length)


def fill_window(sequence: np.ndarray, window: int, eos_id: int, inputs: np.ndarray, targets: np.ndarray) -> None:
    """Write window `window` of `sequence` into the rows `inputs` and `targets` [sequence_length], int64.

    The input at place p of the sequence has the token at p + 1 as its target; past the end the input is EOS and the target
    ignored. So each token of the sequence but the first is a target exactly once over all windows.
    """
    length = len(inputs)
    start = window * length
    valid = min(length, len(sequence) - 1 - start)
    inputs[:valid] = sequence[start : start + valid]
    targets[:valid] = sequence[start + 1 : start + valid + 1]
    inputs[valid:] = eos_id
    targets[valid:] = IGNORED_TARGET


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sequence: np.ndarray | None = None


class ShardCache:
    """The last `capacity` shards used; threads that want the same shard wait for one read of it."""

    def __init__(self, read: Callable[[int], np.ndarray], capacity: int):
        self._read = read
        self._capacity = capacity
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def reserve(self, capacity: int) -> None:
        """Keep at least `capacity` shards from now on."""
        with self._lock:
            self._capacity = max(self._capacity, capacity)

    def get(self, shard: int) -> np.ndarray:
        """The sequence of shard number `shard`; what `read` raises passes through, and the next call tries again."""
        with self._lock:
            entry = self._entries.setdefault(shard, _Entry())
            self._entries.move_to_end(shard)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        with entry.lock:
            if entry.sequence is None:
                entry.sequence = self._read(shard)
            return entry.sequence
