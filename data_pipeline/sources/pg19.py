"""PG-19: `train|validation|test/<id>.txt` with its official splits; `metadata.csv`, titles and years, is not needed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.index import SPLITS
from data_pipeline.sources.base import Document, Source, file_identity, make_document, path_hash, read_file
from spa_dist.errors import DataError


class Pg19Source(Source):
    """Each book is a document. Held-out splits come first, so that a book which is also in train counts as held out."""

    def __init__(self, path: str):
        root = Path(path)
        self.skipped = Counter()
        if not (root / "train").is_dir():
            raise DataError(
                f"{root}: no folder train/ here: --input must hold PG-19's train/, validation/ and test/ folders"
            )
        self._files: list[tuple[str, Path]] = []
        for split in reversed(SPLITS):
            books = [(f"{split}/{file.name}", file) for file in (root / split).glob("*.txt")]
            self._files += sorted(books, key=lambda entry: path_hash(entry[0]))
        self.total_bytes = sum(file.stat().st_size for _, file in self._files)

    def documents(self) -> Iterator[Document]:
        for name, path in self._files:
            yield make_document(name, read_file(path), group=name, split=name.split("/")[0])

    def identity(self) -> list[tuple[str, int, int]]:
        return file_identity(self._files)
