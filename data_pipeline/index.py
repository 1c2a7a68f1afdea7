"""The index of a prepared dataset, `index.json`: what the shards hold, how much of it, and the hashes that prove it."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spa_dist.errors import DataError

FORMAT = "spa_dist.dataset/1"
INDEX_FILE = "index.json"
MANIFEST_FILE = "manifest.jsonl"
TOKENIZER_FILE = "tokenizer.model"
SPLITS = ("train", "validation", "test")

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One tar file of token arrays; `tokens` counts each document's EOS, `bytes` the UTF-8 text, `file_bytes` the tar."""

    file: str
    stream: int
    documents: int
    tokens: int
    words: int
    bytes: int
    file_bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order, and their totals."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def words(self) -> int:
        return sum(shard.words for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def totals(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": self.tokens, "words": self.words, "bytes": self.bytes}


@dataclass(frozen=True)
class Index:
    """All that `index.json` says; `write` and `read_index` are inverse."""

    splits: dict[str, Split]
    tokenizer_file: str
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    dtype: str
    canonical_streams: int
    fingerprint: str = ""
    source: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `index.json` into `folder`."""
        content = {
            "format": FORMAT,
            "canonical_streams": self.canonical_streams,
            "dtype": self.dtype,
            "tokenizer": {
                "file": self.tokenizer_file,
                "sha256": self.tokenizer_sha256,
                "vocab_size": self.vocab_size,
                "eos_id": self.eos_id,
            },
            "splits": {
                name: {**split.totals(), "shards": [asdict(shard) for shard in split.shards]}
                for name, split in self.splits.items()
            },
            "fingerprint": self.fingerprint,
            "source": self.source,
        }
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_index(folder: Path) -> Index:
    """Read and check `index.json`. Raises DataError when it is missing, of another format, or contradicts itself."""
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared dataset here ({INDEX_FILE} is missing): make one with prepare.py") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}): prepare the dataset again") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise DataError(f"{path}: format is {found!r}, this version reads {FORMAT!r}: prepare the dataset again")
    try:
        index = _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error}): prepare the dataset again") from None
    return index


def _parse(content: dict[str, Any]) -> Index:
    tokenizer = content["tokenizer"]
    streams = _count(content, "canonical_streams", minimum=1)
    index = Index(
        splits={name: _parse_split(name, split, streams) for name, split in content["splits"].items()},
        tokenizer_file=_file_name(tokenizer["file"]),
        tokenizer_sha256=_digest(tokenizer["sha256"]),
        vocab_size=_count(tokenizer, "vocab_size", minimum=1),
        eos_id=_count(tokenizer, "eos_id"),
        dtype=content["dtype"],
        canonical_streams=streams,
        fingerprint=str(content["fingerprint"]),
        source=dict(content["source"]),
    )
    if index.dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype {index.dtype!r} is neither uint16 nor uint32")
    if not index.eos_id < index.vocab_size <= 2 ** (16 if index.dtype == "uint16" else 32):
        raise ValueError(f"eos_id {index.eos_id}, vocab_size {index.vocab_size} and {index.dtype} do not fit together")
    return index


def _parse_split(name: str, content: dict[str, Any], streams: int) -> Split:
    shards = tuple(_parse_shard(shard) for shard in content["shards"])
    split = Split(name, shards)
    stated = {key: content[key] for key in split.totals()}
    if stated != split.totals():
        raise ValueError(f"the totals of {name} are {stated}, its shards add up to {split.totals()}")
    if len({shard.file for shard in shards}) != len(shards):
        raise ValueError(f"{name} names a shard twice")
    if name == "train" and {shard.stream for shard in shards} != set(range(streams)):
        raise ValueError(f"the shards of train do not serve each of the {streams} canonical streams")
    return split


def _parse_shard(content: dict[str, Any]) -> Shard:
    counts = {key: _count(content, key) for key in ("stream", "documents", "tokens", "words", "bytes", "file_bytes")}
    if counts["tokens"] < 1:
        raise ValueError(f"shard {content['file']} holds no tokens")
    return Shard(file=_file_name(content["file"]), sha256=_digest(content["sha256"]), **counts)


def _count(content: dict[str, Any], key: str, minimum: int = 0) -> int:
    value = content[key]
    if type(value) is not int or value < minimum:
        raise ValueError(f"{key} is {value!r}")
    return value


def _file_name(value: str) -> str:
    if value in ("", ".", "..") or Path(value).name != value:
        raise ValueError(f"{value!r} is not a plain file name")
    return value


def _digest(value: str) -> str:
    if not _HEX.fullmatch(value):
        raise ValueError(f"{value!r} is not a SHA-256")
    return value
