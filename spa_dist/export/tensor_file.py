"""Files in the safetensors format, read and written a piece at a time.

The format is eight bytes of header length, a JSON header, and the tensors' bytes, so reading executes nothing. The
safetensors package maps whole files when reading and wants whole files in memory when writing; here the caller holds one
tensor at a time, which keeps a conversion's memory independent of the size of the model.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spa_dist.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file of floating-point tensors whose header has been checked. It is open only while something is read."""

    def __init__(self, path: Path):
        self.path = path
        with _opened(path) as file:
            self.metadata, self.specs, self._places = _read_header(path, file)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, contiguous, on the CPU, of the stored dtype and size, with tensor `name`."""
        spec = self.specs[name]
        assert out.is_contiguous() and out.dtype == spec.dtype and out.numel() == math.prod(spec.shape), (spec, out.shape)
        with _opened(self.path) as file:
            file.seek(self._places[name])
            _read_exactly(file, _bytes_of(out), self.path)

    def read(self, name: str) -> Tensor:
        """Tensor `name`, in its stored shape and dtype."""
        out = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self.read_into(name, out)
        return out


def write_tensor_file(path: Path, specs: Iterable[TensorSpec], tensors: Iterator[Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, taking each of `specs`' tensors from `tensors` when its turn comes, and sync it to disk.

    Raises CheckpointError when the disk does not take it.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    specs = list(specs)
    for spec in specs:
        offsets = [place, place + spec.nbytes]
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        place += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for spec in specs:
                tensor = next(tensors)
                assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype, (spec, tensor.shape, tensor.dtype)
                file.write(_bytes_of(tensor.contiguous()))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from None


def _read_header(path: Path, file: FileIO) -> tuple[dict[str, str], dict[str, TensorSpec], dict[str, int]]:
    """Metadata, specs, and the place in the file of each tensor; the tensors must tile the file."""
    size = os.fstat(file.fileno()).st_size
    prefix = bytearray(8)
    _read_exactly(file, memoryview(prefix), path)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is not in the safetensors format: its header would be {length} bytes long")
    text = bytearray(length)
    _read_exactly(file, memoryview(text), path)
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = [_parse_entry(name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not in the safetensors format: its header makes no sense") from None
    end = 0
    for spec, start, stop in sorted(entries, key=lambda entry: entry[1:]):
        if start != end or stop - start != spec.nbytes:
            raise CheckpointError(f"{path}: tensor {spec.name!r} does not lie where its shape says")
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(f"{path} has {size} bytes, and its header tells of {8 + length + end}")
    places = {spec.name: 8 + length + start for spec, start, _ in entries}
    return metadata, {spec.name: spec for spec, _, _ in entries}, places


def _parse_entry(name: str, entry: dict[str, Any]) -> tuple[TensorSpec, int, int]:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 2**48 for number in (*shape, start, stop)):
        raise ValueError(name)
    return TensorSpec(name, shape, DTYPES[entry["dtype"]]), start, stop


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _read_exactly(file: FileIO, out: memoryview, path: Path) -> None:
    done = 0
    while done < len(out):
        count = file.readinto(out[done : done + (1 << 26)])
        if not count:
            raise CheckpointError(f"{path} ends too early")
        done += count
