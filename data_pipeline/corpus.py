"""From a source to split, de-duplicated documents: what is kept, what is not, and how much of it."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_pipeline.sources import Document, Source


@dataclass
class Tally:
    """What passing over a corpus found."""

    kept: Counter[str] = field(default_factory=Counter)
    """Documents by split."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Documents by reason."""
    not_utf8: int = 0
    """Documents decoded as Latin-1."""


class Corpus:
    """A source's documents in its order: each content once, each with a split, up to a limit of bytes.

    A document's split is its source's own, or a function of its group's name and the seed. De-duplication keeps 16 bytes of
    SHA-256 per document in memory.
    """

    def __init__(self, source: Source, *, validation: float, test: float, seed: int, limit_bytes: int | None):
        self.source = source
        self._fractions = (("validation", validation), ("test", test))
        self._seed, self._limit = seed, limit_bytes
        self.tally = Tally()

    def documents(self) -> Iterator[tuple[str, Document]]:
        """Yield (split, document). Starts `tally` anew."""
        self.tally = tally = Tally()
        seen: set[bytes] = set()
        total = 0
        for document in self.source.documents():
            if self._limit is not None and total >= self._limit:
                break
            digest = hashlib.sha256(document.data).digest()[:16]
            if not document.data.strip():
                tally.left_out["empty"] += 1
            elif digest in seen:
                tally.left_out["duplicate"] += 1
            else:
                seen.add(digest)
                total += len(document.data)
                tally.not_utf8 += document.encoding != "utf-8"
                split = document.split or self._split_of(document.group)
                tally.kept[split] += 1
                yield split, document
        tally.left_out.update(self.source.skipped)

    def _split_of(self, group: str) -> str:
        digest = hashlib.sha256(f"{self._seed}/{group}".encode("utf-8", "surrogateescape")).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        for split, fraction in self._fractions:
            if place < fraction:
                return split
            place -= fraction
        return "train"
