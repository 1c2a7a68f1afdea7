"""A prepared dataset on disk: open it, read its tokenizer, read its shards with everything about them verified."""

import hashlib
import io
from pathlib import Path

import numpy as np
from webdataset.tariterators import group_by_keys, tar_file_expander

from data_pipeline.index import Index, Shard, Split, read_index
from data_pipeline.tokenizer import Tokenizer
from spa_dist.errors import DataError


class Dataset:
    """A prepared dataset whose index has been checked; made by `open_dataset`.

    `splits` maps "train", "validation", "test" (those present) to their shards and totals (`index.Split`).
    """

    def __init__(self, path: Path, index: Index):
        self.path = path
        self.index = index

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @property
    def canonical_streams(self) -> int:
        return self.index.canonical_streams

    @property
    def splits(self) -> dict[str, Split]:
        return self.index.splits

    @property
    def tokenizer_path(self) -> Path:
        return self.path / self.index.tokenizer_file

    def split(self, name: str) -> Split:
        """The split `name`. Raises DataError when the dataset has none, or an empty one."""
        if name not in self.splits or not self.splits[name].shards:
            present = ", ".join(key for key, split in self.splits.items() if split.shards)
            raise DataError(f"{self.path}: no documents in split {name!r} (it has: {present}): prepare it with that split")
        return self.splits[name]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the shards were written with, verified against the index. Raises DataError."""
        check_tokenizer(self)
        return Tokenizer.from_file(self.tokenizer_path)

    def read_shard(self, shard: Shard) -> np.ndarray:
        """The shard's token sequence [tokens + 1]: an EOS, then each document with its EOS; uint16 or uint32.

        The file's size, SHA-256, and counts of documents and tokens are compared with the index first. Raises DataError.
        """
        path = self.path / shard.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: shard cannot be read ({error.strerror}): {_REMEDY}") from None
        if len(content) != shard.file_bytes:
            raise DataError(f"{path}: shard has {len(content)} bytes, the index says {shard.file_bytes}: {_REMEDY}")
        if hashlib.sha256(content).hexdigest() != shard.sha256:
            raise DataError(f"{path}: shard is damaged, its SHA-256 differs from the index: {_REMEDY}")
        dtype = np.dtype(self.index.dtype).newbyteorder("<")
        files = tar_file_expander([{"url": str(path), "stream": io.BytesIO(content)}])
        documents = [np.frombuffer(sample["tokens"], dtype) for sample in group_by_keys(files)]
        sequence = np.concatenate([np.array([self.eos_id], dtype), *documents]).astype(self.index.dtype, copy=False)
        if (len(documents), len(sequence) - 1) != (shard.documents, shard.tokens):
            raise DataError(
                f"{path}: shard holds {len(documents)} documents and {len(sequence) - 1} tokens, "
                f"the index says {shard.documents} and {shard.tokens}: {_REMEDY}"
            )
        return sequence


_REMEDY = "copy the dataset again or prepare it again with --force"


def open_dataset(path: str | Path) -> Dataset:
    """Open the dataset folder `path`: the index is checked, every shard must be there in its full size.

    Hashes and counts are checked when a shard is first read. Raises DataError.
    """
    folder = Path(path)
    index = read_index(folder)
    for split in index.splits.values():
        for shard in split.shards:
            try:
                size = (folder / shard.file).stat().st_size
            except OSError as error:
                raise DataError(f"{folder / shard.file}: shard is missing ({error.strerror}): {_REMEDY}") from None
            if size != shard.file_bytes:
                raise DataError(
                    f"{folder / shard.file}: shard has {size} bytes, the index says {shard.file_bytes}: {_REMEDY}"
                )
    return Dataset(folder, index)


def check_tokenizer(dataset: Dataset) -> None:
    """Compare the tokenizer file with the index's SHA-256. Raises DataError when it is missing or another one."""
    path = dataset.tokenizer_path
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: tokenizer cannot be read ({error.strerror}): {_REMEDY}") from None
    if digest != dataset.index.tokenizer_sha256:
        raise DataError(f"{path}: not the tokenizer that wrote these shards (its SHA-256 differs from the index): {_REMEDY}")
