"""What every source shares: the document, how bytes become text, and errors that name the file."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spa_dist.errors import DataError


@dataclass(frozen=True)
class Document:
    """One text of a corpus.

    text is `data` decoded; split is the source's own, or None where the hash of `group` shall decide; input_bytes is how
    far reading it moved through the source's files (see `Source.total_bytes`).
    """

    id: str
    text: str
    data: bytes
    group: str
    input_bytes: int
    split: str | None = None
    encoding: str = "utf-8"


class Source(ABC):
    """A corpus that can be read more than once, in the same order each time.

    total_bytes: size of the files that `documents` reads, for progress. skipped: what `documents` left out in its last run,
    by reason.
    """

    total_bytes: int
    skipped: Counter[str]

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield the documents, one at a time. Raises DataError for a file that cannot be read."""

    @abstractmethod
    def identity(self) -> list[tuple[str, int, int]]:
        """(name, size, modification time in ns) of each file: what makes another run's input the same."""


def decode(data: bytes) -> tuple[str, str]:
    """(text, encoding): UTF-8, or Latin-1 where that fails, which keeps every byte as one character."""
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def make_document(
    name: str, data: bytes, *, group: str, split: str | None = None, input_bytes: int | None = None
) -> Document:
    """The document of one file's (or part's) bytes."""
    text, encoding = decode(data)
    encoded = data if encoding == "utf-8" else text.encode("utf-8")
    size = len(data) if input_bytes is None else input_bytes
    return Document(name, text, encoded, group, size, split, encoding)


def looks_binary(data: bytes) -> bool:
    """Whether the first 8 KiB hold a NUL, which no text has."""
    return b"\0" in data[:8192]


def path_hash(name: str) -> bytes:
    """The key that puts files in an order unrelated to their names, so that any first part is a sample of all."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


def file_identity(files: list[tuple[str, Path]]) -> list[tuple[str, int, int]]:
    """(name, size, mtime_ns) of each file."""
    stats = [(name, path.stat()) for name, path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def read_file(path: Path) -> bytes:
    """The file's bytes; DataError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror or error}): check the path given to --input and its permissions"
    )
