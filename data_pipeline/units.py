"""Encode text by its units, a word with the spaces before it, each distinct one once: text repeats itself.

Sentencepiece merges nothing across a unit's bounds when no piece of the vocabulary spans one, so the result is the same as for
the text in one piece, several times faster.
"""

import re
from collections.abc import Sequence

import numpy as np
import sentencepiece

_UNIT = re.compile(rb" *[^ \n]+|\n| +")
_SPANS_UNITS = re.compile("[^▁]▁|.\n|\n.", re.DOTALL)
_RUN_BYTES = 2048  # short inputs keep the encoder in cache, and its threads busy
_CACHE_BYTES = 8 << 20  # of keys; with their entries about 200 MB


def pieces_fit_units(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether no piece spans two units, and a newline is one piece."""
    pieces = map(processor.id_to_piece, range(processor.get_piece_size()))
    return len(processor.encode("\n")) == 1 and not any(map(_SPANS_UNITS.search, pieces))


class UnitEncoder:
    """Encodes UTF-8 texts with `processor`, whose pieces fit units, keeping the ids of units seen lately."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor):
        self._processor = processor
        (self._newline,) = processor.encode("\n")
        self._ids: dict[bytes, bytes] = {}
        self._key_bytes = 0

    def encode(self, texts: Sequence[bytes], num_threads: int) -> list[np.ndarray]:
        """The ids of each text, int32."""
        units = [_UNIT.findall(text) for text in texts]
        if self._key_bytes > _CACHE_BYTES:
            self._ids.clear()
            self._key_bytes = 0
        self._learn(sorted(set().union(*units) - self._ids.keys()), num_threads)
        return [np.frombuffer(b"".join(map(self._ids.__getitem__, text)), np.int32) for text in units]

    def _learn(self, units: list[bytes], num_threads: int) -> None:
        """Encode `units`, many to a call with newlines between them, and cut the result at the newlines."""
        words = [unit for unit in units if unit != b"\n"]
        self._ids[b"\n"] = np.array([self._newline], np.int32).tobytes()
        step = max(1, len(words) * _RUN_BYTES // (sum(map(len, words)) + 1))
        runs = [b"\n".join(words[k : k + step]) + b"\n" for k in range(0, len(words), step)]
        encoded = self._processor.encode(runs, return_type="numpy", num_threads=num_threads) if runs else []
        ids = np.concatenate([np.empty(0, np.int32), *encoded])
        ends = np.flatnonzero(ids == self._newline) * ids.itemsize
        content, start = ids.tobytes(), 0
        for word, end in zip(words, ends.tolist(), strict=True):
            self._ids[word] = content[start:end]
            start = end + ids.itemsize
        self._key_bytes += sum(map(len, words))
