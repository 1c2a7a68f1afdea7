"""Write a split as webdataset shards, in one pass and bounded memory, dealt evenly over the canonical streams."""

import hashlib
import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import webdataset

from data_pipeline.index import Shard, Split

MIN_STREAM_TOKENS = 4096
"""A corpus too small to give each canonical stream this much gets fewer streams."""


@dataclass(frozen=True)
class TokenDocument:
    """A document ready for a shard: its ids without EOS, and the words and UTF-8 bytes of its text."""

    id: str
    ids: np.ndarray
    words: int
    bytes: int


class _HashingFile:
    """A file that knows the size and SHA-256 of what was written to it."""

    def __init__(self, path: Path):
        self._file: IO[bytes] = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


class _ShardWriter:
    """One tar file; the same documents give the same bytes."""

    def __init__(self, path: Path, stream: int, dtype: np.dtype, eos_id: int):
        self._path, self._stream, self._dtype = path, stream, dtype
        self._eos = np.array([eos_id], dtype)
        self._file = _HashingFile(path)
        self._tar = webdataset.TarWriter(self._file, encoder=False, mtime=0, user="", group="")
        self.tokens = 0
        self._documents = self._words = self._bytes = 0

    def write(self, key: str, document: TokenDocument) -> None:
        tokens = np.concatenate([document.ids.astype(self._dtype), self._eos])
        meta = {"id": document.id, "tokens": len(tokens), "words": document.words, "bytes": document.bytes}
        self._tar.write({"__key__": key, "tokens": tokens.tobytes(), "json": json.dumps(meta).encode()})
        self._documents += 1
        self.tokens += len(tokens)
        self._words += document.words
        self._bytes += document.bytes

    def close(self) -> Shard:
        self._tar.close()
        self._file.close()
        return Shard(
            file=self._path.name,
            stream=self._stream,
            documents=self._documents,
            tokens=self.tokens,
            words=self._words,
            bytes=self._bytes,
            file_bytes=self._file.size,
            sha256=self._file.sha256.hexdigest(),
        )


class SplitWriter:
    """Deal documents to `streams` streams, always to the one with the fewest tokens, and each stream's over its shards.

    A shard is closed once it holds shard_tokens; documents are never cut. The number of streams is settled once the first
    documents are known: the largest divisor of `streams` that leaves none without a document, nor (unless it is the only
    one) with fewer than MIN_STREAM_TOKENS on average. Until then documents wait in memory: at most `streams` of them, or
    streams · MIN_STREAM_TOKENS tokens.
    """

    def __init__(self, folder: Path, split: str, *, streams: int, shard_tokens: int, dtype: str, eos_id: int):
        self._folder, self._split = folder, split
        self._wanted_streams, self._shard_tokens = streams, shard_tokens
        self._dtype, self._eos_id = np.dtype(dtype).newbyteorder("<"), eos_id
        self._waiting: list[TokenDocument] = []
        self._waiting_tokens = 0
        self._loads: list[tuple[int, int]] = []
        self._open: dict[int, _ShardWriter] = {}
        self._shards: list[Shard] = []
        self._documents = self._files = 0

    def write(self, document: TokenDocument) -> None:
        if self._loads:
            self._deal(document)
            return
        self._waiting.append(document)
        self._waiting_tokens += len(document.ids) + 1
        if self._possible_streams() >= self._wanted_streams:
            self._settle(self._wanted_streams)

    def finish(self) -> tuple[Split, int]:
        """Close all shards: the split, and its number of streams (0 when it has no documents)."""
        if self._waiting:
            possible = self._possible_streams()
            self._settle(max(n for n in range(1, possible + 1) if self._wanted_streams % n == 0))
        streams = len(self._loads)
        for stream in sorted(self._open):
            self._shards.append(self._open[stream].close())
        self._open.clear()
        return Split(self._split, tuple(sorted(self._shards, key=lambda shard: shard.file))), streams

    def abandon(self) -> None:
        """Close the files after an error."""
        for writer in self._open.values():
            writer.close()

    def _possible_streams(self) -> int:
        return max(1, min(len(self._waiting), self._waiting_tokens // MIN_STREAM_TOKENS))

    def _settle(self, streams: int) -> None:
        self._loads = [(0, stream) for stream in range(streams)]
        for document in self._waiting:
            self._deal(document)
        self._waiting = []

    def _deal(self, document: TokenDocument) -> None:
        load, stream = self._loads[0]
        writer = self._open.get(stream)
        if writer is None:
            path = self._folder / f"{self._split}-{self._files:05d}.tar"
            writer = self._open[stream] = _ShardWriter(path, stream, self._dtype, self._eos_id)
            self._files += 1
        writer.write(f"{self._documents:09d}", document)
        self._documents += 1
        if writer.tokens >= self._shard_tokens:
            self._shards.append(writer.close())
            del self._open[stream]
        heapq.heapreplace(self._loads, (load + len(document.ids) + 1, stream))
