"""Prepare a dataset: tokenizer, shards, manifest and index, in bounded memory, from any source."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from tqdm import tqdm

from data_pipeline.corpus import Corpus, Dropped, Kept
from data_pipeline.dataset import Dataset, open_dataset
from data_pipeline.index import MANIFEST_FILE, SPLITS, TOKENIZER_FILE, Index, Split, read_index
from data_pipeline.output import complete_folder
from data_pipeline.shards import SplitWriter, TokenDocument
from data_pipeline.sources import Source, open_source
from data_pipeline.tokenizer import MODEL_TYPES, Tokenizer, train_tokenizer
from spa_dist.errors import DataError

_BATCH_BYTES = 4 << 20
"""Text encoded at once: enough for several threads, little beside everything else in memory."""


@dataclass(frozen=True)
class Options:
    """What is prepared, and how. Everything but `output`, `force`, `num_threads` and `progress` decides the result."""

    source: str
    output: Path
    input: str | None = None
    vocab_size: int = 4096
    tokenizer: Path | None = None
    model_type: str = "bpe"
    tokenizer_bytes: int = 10_000_000
    shard_tokens: int = 2_000_000
    streams: int = 64
    limit_bytes: int | None = None
    validation_fraction: float = 0.02
    test_fraction: float = 0.0
    seed: int = 0
    force: bool = False
    num_threads: int = 1
    progress: bool = True

    def check(self) -> None:
        """Raise DataError for a value out of range."""
        for name in ("vocab_size", "tokenizer_bytes", "shard_tokens", "streams", "num_threads"):
            if getattr(self, name) < 1:
                raise DataError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give at least 1")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise DataError(f"--limit-bytes is {self.limit_bytes}: give at least 1, or leave it out")
        if self.model_type not in MODEL_TYPES:
            raise DataError(f"--model-type is {self.model_type!r}: give one of {', '.join(MODEL_TYPES)}")
        fractions = (self.validation_fraction, self.test_fraction)
        if min(fractions) < 0 or sum(fractions) >= 1:
            raise DataError(
                f"--validation-fraction and --test-fraction are {fractions}: give numbers from 0, below 1 in sum"
            )


@dataclass
class Result:
    """What was prepared: the dataset, whether it was there already, the seconds it took, and what was left out or mended."""

    dataset: Dataset
    reused: bool
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)


def prepare_dataset(options: Options) -> Result:
    """Make the dataset `options` describe at options.output, or find it there. Raises DataError."""
    options.check()
    start = time.monotonic()
    source = open_source(options.source, options.input)
    tokenizer = Tokenizer.from_file(options.tokenizer) if options.tokenizer else None
    fingerprint = _fingerprint(options, source, tokenizer)
    if not options.force and _is_prepared(options.output, fingerprint):
        dataset = open_dataset(options.output)
        return Result(dataset, True, time.monotonic() - start, dataset.index.source["counts"])
    with complete_folder(options.output, replace=options.force) as folder:
        _build(options, source, tokenizer, fingerprint, folder)
    dataset = open_dataset(options.output)
    return Result(dataset, False, time.monotonic() - start, dataset.index.source["counts"])


def _is_prepared(folder: Path, fingerprint: str) -> bool:
    try:
        return read_index(folder).fingerprint == fingerprint
    except DataError:
        return False


def _build(options: Options, source: Source, tokenizer: Tokenizer | None, fingerprint: str, folder: Path) -> None:
    corpus = Corpus(
        source,
        limit_bytes=options.limit_bytes,
        validation=options.validation_fraction,
        test=options.test_fraction,
        seed=options.seed,
    )
    sample = corpus.scan(options.tokenizer_bytes)
    if not sample:
        raise DataError(f"--source {options.source}: no text for training in {options.input or 'the installed packages'}")
    if tokenizer is None:
        tokenizer = train_tokenizer(sample, vocab_size=options.vocab_size, model_type=options.model_type)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.model)
    splits, streams, counts = _write_shards(options, corpus, tokenizer, folder)
    Index(
        splits=splits,
        tokenizer_file=TOKENIZER_FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=_dtype(tokenizer),
        canonical_streams=streams,
        fingerprint=fingerprint,
        source={
            "name": options.source,
            "manifest_sha256": _file_sha256(folder / MANIFEST_FILE),
            "counts": counts,
        },
    ).write(folder)


def _write_shards(
    options: Options, corpus: Corpus, tokenizer: Tokenizer, folder: Path
) -> tuple[dict[str, Split], int, dict[str, int]]:
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        writers = {
            split: SplitWriter(
                folder,
                split,
                streams=options.streams if split == "train" else 1,
                shard_tokens=options.shard_tokens,
                dtype=_dtype(tokenizer),
                eos_id=tokenizer.eos_id,
            )
            for split in SPLITS
        }
        for writer in writers.values():
            stack.callback(writer.abandon)
        manifest = stack.enter_context((folder / MANIFEST_FILE).open("w", encoding="utf-8"))
        bar = stack.enter_context(_progress_bar(options, corpus.source))
        for batch in _batches(corpus.documents()):
            _write_batch(batch, tokenizer, options.num_threads, writers, manifest, counts)
            kept = sum(len(item.document.data) for item in batch if isinstance(item, Kept))
            bar.update(kept if options.limit_bytes else sum(item.document.input_bytes for item in batch))
        finished = {split: writer.finish() for split, writer in writers.items()}
    counts.update({f"skipped: {reason}": count for reason, count in corpus.source.skipped.items()})
    return {split: result[0] for split, result in finished.items()}, finished["train"][1], dict(sorted(counts.items()))


def _write_batch(
    batch: list[Kept | Dropped],
    tokenizer: Tokenizer,
    num_threads: int,
    writers: dict[str, SplitWriter],
    manifest: IO[str],
    counts: Counter[str],
) -> None:
    """Encode a batch, deal it to the splits' writers, and give each document its line in the manifest."""
    encoded = iter(
        tokenizer.encode_documents([item.document.data for item in batch if isinstance(item, Kept)], num_threads=num_threads)
    )
    for item in batch:
        document = item.document
        row = {"id": document.id, "sha256": item.sha256, "bytes": len(document.data)}
        if isinstance(item, Dropped):
            row["dropped"] = item.reason
            counts[item.reason] += 1
        else:
            ids = next(encoded)
            words = len(document.text.split())
            row |= {"split": item.split, "words": words, "tokens": len(ids) + 1}
            writers[item.split].write(TokenDocument(document.id, ids, words, len(document.data)))
        if document.encoding != "utf-8":
            row["encoding"] = document.encoding
            counts[document.encoding] += 1
        manifest.write(json.dumps(row) + "\n")


def _batches(documents: Iterable[Kept | Dropped]) -> Iterator[list[Kept | Dropped]]:
    batch: list[Kept | Dropped] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item.document.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _progress_bar(options: Options, source: Source) -> "tqdm[None]":
    total = min(options.limit_bytes, source.total_bytes) if options.limit_bytes else source.total_bytes
    return tqdm(total=total, unit="B", unit_scale=True, desc="encoding", disable=not options.progress, mininterval=0.5)


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def _fingerprint(options: Options, source: Source, tokenizer: Tokenizer | None) -> str:
    """What decides the result: two runs with the same fingerprint prepare the same dataset."""
    deciding = asdict(options)
    for name in ("output", "force", "num_threads", "progress", "input", "tokenizer"):
        del deciding[name]
    deciding |= {"tokenizer": tokenizer.sha256 if tokenizer else None, "files": source.identity()}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
