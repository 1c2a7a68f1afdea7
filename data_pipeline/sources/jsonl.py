"""arXiv as JSON lines: RedPajama's `{"text", "meta": {"arxiv_id"}}`, or scientific_papers' `article_text`."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from data_pipeline.sources.base import Document, Source, file_identity, make_document, path_hash, unreadable
from spa_dist.errors import DataError


class ArxivSource(Source):
    """Each line of each `.jsonl`, `.json` or `.jsonl.gz` file is a paper; papers without text are left out, and counted."""

    def __init__(self, path: str):
        root = Path(path)
        self.skipped = Counter()
        if root.is_file():
            found = [root]
        elif root.is_dir():
            found = [file for pattern in ("*.jsonl", "*.jsonl.gz", "*.json", "*.txt") for file in root.rglob(pattern)]
        else:
            raise DataError(f"{root}: no such file or folder: check --input")
        if not found:
            raise DataError(
                f"{root}: no .jsonl, .jsonl.gz or .json files here: --input must hold arXiv papers as JSON lines"
            )
        base = root if root.is_dir() else root.parent
        named = [(file.relative_to(base).as_posix(), file) for file in found]
        self._files = sorted(named, key=lambda entry: path_hash(entry[0]))
        self.total_bytes = sum(file.stat().st_size for _, file in self._files)

    def documents(self) -> Iterator[Document]:
        self.skipped = Counter()
        for name, path in self._files:
            before = 0
            try:
                with path.open("rb") as raw:
                    lines: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
                    for number, line in enumerate(lines, start=1):
                        read, before = raw.tell() - before, raw.tell()
                        if not line.strip():
                            continue
                        identity, text = self._paper(line, f"{name}:{number}", path)
                        if not text.strip():
                            self.skipped["without text"] += 1
                            continue
                        yield make_document(identity, text.encode("utf-8", "replace"), group=identity, input_bytes=read)
            except OSError as error:
                raise unreadable(path, error) from None

    def identity(self) -> list[tuple[str, int, int]]:
        return file_identity(self._files)

    def _paper(self, line: bytes, place: str, path: Path) -> tuple[str, str]:
        """The paper's id and text. Raises DataError for a line that is no JSON object."""
        try:
            paper: Any = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, {place.rsplit(':', 1)[1]}: not a line of JSON ({error}): repair or remove it"
            ) from None
        if not isinstance(paper, dict):
            raise DataError(f"{path}, {place.rsplit(':', 1)[1]}: a line must hold a JSON object, not {type(paper).__name__}")
        meta = paper.get("meta")
        identity = (meta.get("arxiv_id") if isinstance(meta, dict) else None) or paper.get("article_id") or place
        text = paper.get("text")
        if text is None:
            parts = [*_sentences(paper.get("abstract_text")), *_sentences(paper.get("article_text"))]
            text = "\n".join(parts)
        return str(identity), str(text)


def _sentences(value: Any) -> list[str]:
    """scientific_papers marks sentences of an abstract with <S> and </S>."""
    values = value if isinstance(value, list) else []
    return [str(sentence).removeprefix("<S> ").removesuffix(" </S>") for sentence in values]
