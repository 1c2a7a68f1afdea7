"""From a source to the documents that are kept: duplicates out, a split for each, every one accounted for."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.order import unit_interval
from data_pipeline.sources import Document, Source

SCAN_FACTOR = 32
"""The tokenizer's sample is drawn from the first SCAN_FACTOR times its size."""

_SLICE = 65536  # characters that one document gives to the tokenizer's sample


@dataclass(frozen=True)
class Kept:
    """A document of the dataset: its source's document, its split, and the SHA-256 of its UTF-8 text."""

    document: Document
    split: str
    sha256: str


@dataclass(frozen=True)
class Dropped:
    """A document left out, and why: "duplicate" or "empty"."""

    document: Document
    reason: str
    sha256: str


class Corpus:
    """The documents of `source`, in its order, up to `limit_bytes` of kept text.

    A document of white space alone is dropped, and one whose text came before. Where the source has no splits of its own, the
    hash of (seed, group) is compared with validation_fraction and test_fraction. `scan` must run before `documents`.
    """

    def __init__(self, source: Source, *, limit_bytes: int | None, validation: float, test: float, seed: int):
        self.source = source
        self._limit = limit_bytes
        self._validation, self._test = validation, test
        self._seed = seed
        self._held_out_group: str | None = None

    def documents(self) -> Iterator[Kept | Dropped]:
        seen: set[bytes] = set()
        size = 0
        for document in self.source.documents():
            digest = hashlib.sha256(document.data)
            if not document.text.strip():
                yield Dropped(document, "empty", digest.hexdigest())
            elif digest.digest() in seen:
                yield Dropped(document, "duplicate", digest.hexdigest())
            else:
                if self._limit is not None and size and size + len(document.data) > self._limit:
                    return
                seen.add(digest.digest())
                size += len(document.data)
                yield Kept(document, document.split or self._split_of(document.group), digest.hexdigest())

    def scan(self, sample_bytes: int) -> list[str]:
        """A sample of the training text, about sample_bytes of it, for the tokenizer: slices of documents drawn by hash.

        Also settles the splits of a small corpus: when no document falls in validation though a fraction is asked for, the
        group with the lowest hash does, if there is another.
        """
        sample = _Sample(sample_bytes)
        splits, groups = Counter[str](), set[tuple[float, str]]()
        size = 0
        for kept in self.documents():
            if not isinstance(kept, Kept):
                continue
            size += len(kept.document.data)
            if size > SCAN_FACTOR * sample_bytes:
                return sample.texts()
            splits[kept.split] += 1
            group = kept.document.group
            groups = set(sorted(groups | {(self._place(group), group)})[:2])
            if kept.split == "train":
                sample.add(unit_interval("slice", self._seed, kept.sha256), _slice(kept))
        if self._validation and set(splits) <= {"train", "test"} and len(groups) == 2 and self._held_out_group is None:
            self._held_out_group = min(groups)[1]
            return self.scan(sample_bytes)
        return sample.texts()

    def _place(self, group: str) -> float:
        return unit_interval("split", self._seed, group)

    def _split_of(self, group: str) -> str:
        place = self._place(group)
        if place < self._validation or group == self._held_out_group:
            return "validation"
        return "test" if place < self._validation + self._test else "train"


def _slice(kept: Kept) -> str:
    text = kept.document.text
    start = int(unit_interval("start", kept.sha256) * max(1, len(text) - _SLICE))
    return text[start : start + _SLICE]


class _Sample:
    """The texts with the lowest keys, just enough of them for `size` bytes."""

    def __init__(self, size: int):
        self._limit, self._size = size, 0
        self._heap: list[tuple[float, str, int]] = []

    def add(self, key: float, text: str) -> None:
        size = len(text.encode("utf-8"))
        heapq.heappush(self._heap, (-key, text, size))
        self._size += size
        while self._size - self._heap[0][2] >= self._limit:
            self._size -= heapq.heappop(self._heap)[2]

    def texts(self) -> list[str]:
        return [text for _, text, _ in sorted(self._heap, reverse=True)]
