"""Read a training checkpoint of any tensor-parallel and data-parallel size, one full parameter at a time.

A checkpoint holds, for each rank, 1-D fragments of the flattened parts of parameters. Joining them needs the layout table
of the manifest and nothing else: no process group, no DeepSpeed, no Megatron.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from spa_dist.errors import CheckpointError
from spa_dist.export.manifest import WEIGHTS_FILE, Entry, Manifest, find_checkpoint, read_manifest
from spa_dist.export.tensor_file import TensorFile

_DRIFT = 1e-3
"""How far copies of a replicated parameter may differ, relative to its largest entry: rounding, not another model."""


class Checkpoint:
    """A verified checkpoint; made by `open_checkpoint`. `manifest` tells of it, `tensor` reads it."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._fragments: dict[tuple[str, int], list[tuple[int, int, TensorFile]]] = {}
        for name in manifest.files:
            if WEIGHTS_FILE.fullmatch(name):
                self._index(name)

    def tensor(self, name: str) -> Tensor:
        """The full parameter or buffer `name`, fp32, vocabulary padding included.

        Memory: the tensor itself, and for a split other than along dimension 0 one rank's part.
        Raises CheckpointError when the fragments do not make the whole.
        """
        entry = self.manifest.layout[name]
        for rank in range(self.manifest.tensor_size):
            self._check_tiled(name, rank, _part_numel(entry, self.manifest.tensor_size))
        full = torch.empty(entry.shape)
        if entry.dim is None:
            self._read_part(name, 0, full)
            self._compare_copies(name, full)
            return full
        for rank, part in enumerate(full.chunk(self.manifest.tensor_size, dim=entry.dim)):
            if part.is_contiguous():
                self._read_part(name, rank, part)
            else:
                own = torch.empty(part.shape)
                self._read_part(name, rank, own)
                part.copy_(own)
        return full

    def _check_tiled(self, name: str, rank: int, numel: int) -> None:
        """Raise CheckpointError unless the fragments follow one another from 0 to numel: before any memory is taken for them."""
        end = 0
        for start, count, _ in self._parts(name, rank):
            if start != end:
                break
            end += count
        if end != numel:
            where = f"tensor-parallel rank {rank}"
            raise CheckpointError(f"{self.manifest.folder}: the fragments of {name} do not make a whole on {where}")

    def _parts(self, name: str, rank: int) -> list[tuple[int, int, TensorFile]]:
        return sorted(self._fragments.get((name, rank), []), key=lambda fragment: fragment[:2])

    def _read_part(self, name: str, rank: int, out: Tensor) -> None:
        """Fill contiguous `out` with tensor-parallel rank `rank`'s part."""
        flat = out.view(-1)
        for start, numel, file in self._parts(name, rank):
            file.read_into(name, flat[start : start + numel])

    def _compare_copies(self, name: str, first: Tensor) -> None:
        """Each tensor-parallel rank saved its own copy of a replicated parameter: they must be the same."""
        for rank in range(1, self.manifest.tensor_size):
            other = torch.empty_like(first)
            self._read_part(name, rank, other)
            if not bool((other - first).abs().max() <= _DRIFT * first.abs().max()):
                raise CheckpointError(
                    f"{self.manifest.folder}: ranks 0 and {rank} hold different copies of {name}: not one model"
                )

    def _index(self, file_name: str) -> None:
        manifest, path = self.manifest, self.manifest.folder / file_name
        match = WEIGHTS_FILE.fullmatch(file_name)
        assert match
        tensor_rank, data_rank = map(int, match.groups())
        file = TensorFile(path)
        if tensor_rank >= manifest.tensor_size or data_rank >= manifest.data_size:
            raise CheckpointError(f"{path}: there is no such rank in the checkpoint's layout")
        try:
            places = {
                name: (int(start), int(numel)) for name, (start, numel) in json.loads(file.metadata["fragments"]).items()
            }
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}: its metadata does not tell which fragments it holds") from None
        for name, spec in file.specs.items():
            start, numel = places.get(name, (0, -1))
            entry = manifest.layout.get(name)
            if entry is None or not 0 <= start <= start + numel <= _part_numel(entry, manifest.tensor_size):
                raise CheckpointError(f"{path}: fragment {name!r} is not one of the checkpoint's parameters")
            if spec.shape != (numel,) or spec.dtype != torch.float32:
                raise CheckpointError(f"{path}: fragment {name!r} is not the {numel} fp32 values that its metadata tells of")
            self._fragments.setdefault((name, tensor_rank), []).append((start, numel, file))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find the checkpoint that `path` means (`find_checkpoint`) and verify size and SHA-256 of each file of weights.

    Raises CheckpointError, in one line that names the file, for one that is missing or damaged.
    """
    manifest = read_manifest(find_checkpoint(path))
    for name, (size, digest) in manifest.files.items():
        if WEIGHTS_FILE.fullmatch(name):
            verify_file(manifest.folder / name, size, digest)
    return Checkpoint(manifest)


def verify_file(path: Path, size: int | None, digest: str) -> None:
    """Raise CheckpointError unless the file has this size (None: any) and SHA-256."""
    try:
        if not path.is_file() and path.exists():  # a pipe or a device would keep its reader for ever
            raise CheckpointError(f"{path} is not a file: the checkpoint is damaged, use another step")
        actual = path.stat().st_size
        if size is not None and actual != size:
            raise CheckpointError(f"{path} has {actual} bytes instead of {size}: it is damaged, use another step")
        if sha256_of(path) != digest:
            raise CheckpointError(f"{path} does not have the SHA-256 of the manifest: it is damaged, use another step")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): the checkpoint is not whole, use another step"
        ) from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _part_numel(entry: Entry, tensor_size: int) -> int:
    return math.prod(entry.shape) // (1 if entry.dim is None else tensor_size)
