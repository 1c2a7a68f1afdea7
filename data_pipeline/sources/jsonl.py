"""arXiv as JSON lines: RedPajama's layout, and that of scientific_papers."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from data_pipeline.sources.base import Document, Source, decode, file_identity, path_hash, unreadable
from spa_dist.errors import DataError

try:
    from compression import zstd  # Python 3.14
except ImportError:
    zstd = None

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".txt")


class ArxivSource(Source):
    """Each line is a paper; files in the order of the hash of their names. `.jsonl` or `.jsonl.gz` (`.jsonl.zst` from Python 3.14).

    RedPajama: `{"text", "meta": {"arxiv_id"}}`. scientific_papers: `{"article_id", "article_text": [...], "abstract_text": [...],
    "section_names", "sections"}`, made into abstract, then sections under their names, without its <S> marks.
    """

    def __init__(self, path: str):
        self.skipped = Counter()
        root = Path(path)
        if root.is_dir():
            files = [
                (file.relative_to(root).as_posix(), file) for file in root.rglob("*") if file.name.endswith(_SUFFIXES[:3])
            ]
        elif root.is_file() and root.name.endswith(_SUFFIXES):
            files = [(root.name, root)]
        else:
            raise DataError(f"{root}: no such file or folder of JSON lines ({', '.join(_SUFFIXES[:3])}): check --input")
        if zstd is None and any(name.endswith(".zst") for name, _ in files):
            raise DataError(f"{root}: Python reads .zst from version 3.14 on: decompress the files first (zstd -d)")
        self._files = sorted(files, key=lambda entry: path_hash(entry[0]))
        self.total_bytes = sum(file.stat().st_size for _, file in self._files)

    def documents(self) -> Iterator[Document]:
        for name, path in self._files:
            try:
                with path.open("rb") as raw:
                    yield from self._lines(name, path, raw)
            except (OSError, EOFError, zlib.error) as error:
                if isinstance(error, OSError) and error.strerror:
                    raise unreadable(path, error) from None
                raise DataError(f"{path}: cannot be decompressed ({error}): download it again") from None

    def identity(self) -> list[tuple[str, int, int]]:
        return file_identity(self._files)

    def _lines(self, name: str, path: Path, raw: IO[bytes]) -> Iterator[Document]:
        place = 0
        for number, line in enumerate(_open(path, raw), start=1):
            if not line.strip():
                continue
            here = raw.tell()
            yield _parse(name, path, number, line, here - place)
            place = here


def _open(path: Path, raw: IO[bytes]) -> Iterator[bytes]:
    if path.suffix == ".gz":
        yield from gzip.GzipFile(fileobj=raw)
    elif path.suffix == ".zst":
        yield from zstd.ZstdFile(raw)
    else:
        while line := raw.readline():
            yield line


def _parse(name: str, path: Path, number: int, line: bytes, input_bytes: int) -> Document:
    decoded, encoding = decode(line)
    try:
        record = json.loads(decoded)
        text = record["text"] if "text" in record else _scientific_paper(record)
        identity = (record.get("meta") or {}).get("arxiv_id") or record.get("article_id") or f"{name}:{number}"
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        # An escaped half of a surrogate pair: JSON can write it, UTF-8 cannot.
        text, encoding = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), "lone-surrogates"
        data = text.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: line {number} is neither a RedPajama nor a scientific_papers record ({type(error).__name__}: {error})"
        ) from None
    return Document(str(identity), text, data, str(identity), input_bytes, None, encoding)


def _scientific_paper(record: dict[str, Any]) -> str:
    abstract = "\n".join(sentence.replace("<S>", "").replace("</S>", "").strip() for sentence in record["abstract_text"])
    if "sections" in record:
        bodies = [f"{name}\n" + "\n".join(body) for name, body in zip(record["section_names"], record["sections"])]
    else:
        bodies = ["\n".join(record["article_text"])]
    return "\n\n".join([abstract, *bodies])
