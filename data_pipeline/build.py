"""Turn a corpus into a dataset folder: tokenizer, shards, index, manifest; it appears by rename when it is whole."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from data_pipeline.corpus import Corpus
from data_pipeline.index import MANIFEST_FILE, SPLITS, TOKENIZER_FILE, Index, Split, read_index
from data_pipeline.shards import SplitWriter, TokenDocument
from data_pipeline.sources import Document, open_source
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from spa_dist.errors import DataError

_BATCH_BYTES = 4 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """What decides the content of a dataset."""

    source: str
    input: str | None
    vocab_size: int
    tokenizer: str | None
    tokenizer_bytes: int
    shard_tokens: int
    streams: int
    limit_bytes: int | None
    validation: float
    test: float
    seed: int


@dataclass(frozen=True)
class Report:
    """What was written."""

    index: Index
    corpus: Corpus
    seconds: float


def fingerprint(options: Options) -> str:
    """A hash of the options and of the input files' names, sizes and times: equal for a run that would write the same."""
    files = open_source(options.source, options.input).identity()
    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    extra = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer and tokenizer.is_file() else ""
    return hashlib.sha256(json.dumps([asdict(options), files, extra]).encode("utf-8", "surrogateescape")).hexdigest()


def is_prepared(folder: Path, mark: str) -> bool:
    """Whether `folder` holds a dataset made from the same inputs with the same options."""
    try:
        return read_index(folder).fingerprint == mark
    except DataError:
        return False


def build_dataset(
    folder: Path, options: Options, *, force: bool, reading: Callable[[str, int], tuple[Progress, Callable[[], None]]]
) -> Report:
    """Write the dataset `folder`.

    Args:
        force: replace what is there.
        reading: called with a title and the bytes to read; gives a function that takes each piece's bytes, and one that ends.

    Raises:
        DataError: no text, an unreadable input, a folder that is in the way. Nothing half-written stays behind.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]) and not force:
        raise DataError(
            f"{folder} is there already and holds something else: add --force to replace it, or choose another --output"
        )
    began = time.monotonic()
    corpus = Corpus(
        open_source(options.source, options.input),
        validation=options.validation,
        test=options.test,
        seed=options.seed,
        limit_bytes=options.limit_bytes,
    )
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        temporary.mkdir(parents=True)
        index = _write(temporary, corpus, options, reading)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}): check --output") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Report(index, corpus, time.monotonic() - began)


def _write(folder: Path, corpus: Corpus, options: Options, reading: Callable) -> Index:
    mark = fingerprint(options)
    tokenizer = _tokenizer(corpus, options, reading)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.model)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    writers = {
        split: SplitWriter(
            folder,
            split,
            streams=options.streams if split == "train" else 1,
            shard_tokens=options.shard_tokens,
            dtype=dtype,
            eos_id=tokenizer.eos_id,
        )
        for split in SPLITS
    }
    progress, end = reading("tokenizing", _bytes_to_read(corpus, options))
    try:
        with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as manifest:
            for batch in _batches(corpus.documents(), progress):
                _write_batch(batch, tokenizer, writers, manifest)
        splits, streams = _finish(writers)
    finally:
        end()
        for writer in writers.values():
            writer.abandon()
    _check_content(corpus, splits)
    index = Index(
        splits=splits,
        tokenizer_file=TOKENIZER_FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=dtype,
        canonical_streams=streams,
        fingerprint=mark,
        source={"name": options.source, "left_out": dict(corpus.tally.left_out), "not_utf8": corpus.tally.not_utf8},
    )
    index.write(folder)
    return index


def _tokenizer(corpus: Corpus, options: Options, reading: Callable) -> Tokenizer:
    if options.tokenizer:
        return Tokenizer.from_file(options.tokenizer)
    progress, end = reading("training the tokenizer", options.tokenizer_bytes)
    try:
        return train_tokenizer(_sample(corpus, options.tokenizer_bytes, progress), vocab_size=options.vocab_size)
    finally:
        end()


def _sample(corpus: Corpus, limit: int, progress: Progress) -> Iterator[str]:
    """Training text from the front of the corpus, whose files stand in the order of a hash; at most `limit` bytes."""
    taken = 0
    for split, document in corpus.documents():
        if split == "train":
            text = document.text[: limit - taken]
            taken += len(document.data)
            progress(len(document.data))
            yield text
        if taken >= limit:
            return
    if not taken:
        _check_content(corpus, {})


def _bytes_to_read(corpus: Corpus, options: Options) -> int:
    total = corpus.source.total_bytes
    return total if options.limit_bytes is None else min(total, options.limit_bytes)


def _batches(documents: Iterator[tuple[str, Document]], progress: Progress) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    size = 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document.data)
        progress(document.input_bytes)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_batch(
    batch: list[tuple[str, Document]], tokenizer: Tokenizer, writers: dict[str, SplitWriter], manifest: TextIO
) -> None:
    ids = tokenizer.encode_documents([document.data for _, document in batch], num_threads=os.cpu_count() or 1)
    for (split, document), tokens in zip(batch, ids):
        words = len(document.text.split())
        writers[split].write(TokenDocument(document.id, tokens, words, len(document.data)))
        entry = {
            "id": document.id,
            "split": split,
            "bytes": len(document.data),
            "words": words,
            "tokens": len(tokens) + 1,
            "encoding": document.encoding,
            "sha256": hashlib.sha256(document.data).hexdigest(),
        }
        manifest.write(json.dumps(entry) + "\n")


def _finish(writers: dict[str, SplitWriter]) -> tuple[dict[str, Split], int]:
    finished = {name: writer.finish() for name, writer in writers.items()}
    return {name: split for name, (split, _) in finished.items() if split.shards}, finished["train"][1]


def _check_content(corpus: Corpus, splits: dict[str, Split]) -> None:
    if "train" in splits:
        return
    left_out = ", ".join(f"{count} {reason}" for reason, count in corpus.tally.left_out.items())
    raise DataError(f"the corpus has no text to train on ({left_out or 'no documents'}): check --source and --input")
