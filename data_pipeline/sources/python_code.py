"""The default corpus: Python source of the standard library and the installed packages of the running interpreter."""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.sources.base import Document, Source, file_identity, make_document, path_hash

_SKIPPED_FOLDERS = {"__pycache__", "test", "tests", "_vendor", "vendor", "vendored"}
"""Compiled files, and what is mostly tables of cases or copies of other packages."""


class PythonSource(Source):
    """Every `.py` file outside tests and vendored copies, in the order of the hash of its name."""

    def __init__(self) -> None:
        self.skipped = Counter()
        self._files = sorted(_python_files(), key=lambda entry: path_hash(entry[0]))
        self.total_bytes = sum(path.stat().st_size for _, path in self._files)

    def documents(self) -> Iterator[Document]:
        self.skipped = Counter()
        for name, path in self._files:
            try:
                data = path.read_bytes()
            except OSError:  # someone else's package, perhaps not for our eyes
                self.skipped["unreadable"] += 1
                continue
            yield make_document(name, data, group=name)

    def identity(self) -> list[tuple[str, int, int]]:
        return [(name, size, 0) for name, size, _ in file_identity(self._files)]


def _python_files() -> Iterator[tuple[str, Path]]:
    seen = set()
    for label, key in (("stdlib", "stdlib"), ("site-packages", "purelib"), ("site-packages", "platlib")):
        root = Path(sysconfig.get_path(key))
        for folder, folders, files in os.walk(root):
            outside = {"site-packages", "dist-packages"} if label == "stdlib" else set()
            folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS | outside)
            for file in files:
                path = Path(folder, file)
                if file.endswith(".py") and path not in seen and path.is_file():
                    seen.add(path)
                    yield f"{label}/{path.relative_to(root).as_posix()}", path
