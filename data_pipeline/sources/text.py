"""Any text: one file, or a folder of files."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.sources.base import Document, Source, file_identity, looks_binary, make_document, path_hash, unreadable
from spa_dist.errors import DataError

FEW_FILES = 64
"""With fewer files than this, parts of files are the documents: one book alone must still give several splits and streams."""

_SMALLEST_PART, _LARGEST_PART, _LARGEST_DOCUMENT = 16 << 10, 256 << 10, 4 << 20


class TextSource(Source):
    """Each file is a document; hidden and binary files are left out, and counted.

    Fewer than FEW_FILES files are cut after a newline into parts of total / 256 (16 to 256 KiB), each of which is a document
    with a split of its own. A larger corpus keeps its files whole, those above 4 MiB in several documents of one split.
    """

    def __init__(self, path: str):
        self.skipped = Counter()
        self._hidden = 0
        self._files = sorted(self._list(Path(path)), key=lambda entry: path_hash(entry[0]))
        self.total_bytes = sum(file.stat().st_size for _, file in self._files)
        self._few = len(self._files) < FEW_FILES
        self._part_bytes = (
            min(max(self.total_bytes // 256, _SMALLEST_PART), _LARGEST_PART) if self._few else _LARGEST_DOCUMENT
        )

    def documents(self) -> Iterator[Document]:
        self.skipped = Counter({"hidden": self._hidden} if self._hidden else {})
        for name, path in self._files:
            for number, part in enumerate(self._parts(path)):
                part_name = f"{name}#{number}" if number or self._few else name
                yield make_document(part_name, part, group=part_name if self._few else name)

    def identity(self) -> list[tuple[str, int, int]]:
        return file_identity(self._files)

    def _list(self, root: Path) -> Iterator[tuple[str, Path]]:
        if root.is_file():
            yield root.name, root
            return
        if not root.is_dir():
            raise DataError(f"{root}: no such file or folder: check --input")
        for folder, folders, files in os.walk(root, onerror=_raise):
            self._hidden += sum(name.startswith(".") for name in files + folders)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for file in sorted(files):
                path = Path(folder, file)
                if not file.startswith(".") and path.is_file():
                    yield path.relative_to(root).as_posix(), path

    def _parts(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                rest = b""
                while block := file.read(self._part_bytes - len(rest)):
                    if not rest and file.tell() == len(block) and looks_binary(block):
                        self.skipped["binary"] += 1
                        return
                    data = rest + block
                    cut = len(data) if len(data) < self._part_bytes else _cut(data)
                    rest = data[cut:]
                    if cut:
                        yield data[:cut]
                if rest:
                    yield rest
        except OSError as error:
            raise unreadable(path, error) from None


def _raise(error: OSError) -> None:
    raise unreadable(Path(error.filename), error)


def _cut(data: bytes) -> int:
    """Where to cut `data`: after its last newline, else its last space, else between two characters."""
    for mark in (b"\n", b" "):
        if (place := data.rfind(mark)) > 0:
            return place + 1
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else len(data)
