"""Read a checkpoint's tensors at any layout: fragments of any ZeRO stage, parts of any tensor-parallel size."""

import json
import math
from pathlib import Path
from typing import Any

import safetensors
import torch

from spa_dist.errors import CheckpointError
from spa_dist.parallel.layout import ParameterLayout

WEIGHT = ""
"""Key of the fp32 master weight itself; Adam's moments have their own."""


class Checkpoint:
    """A committed checkpoint folder. Files are mapped, and opened on first use."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self.tensor_size = int(manifest["parallel"]["tensor"])
        self.data_size = int(manifest["parallel"]["data"])
        self._files: dict[str, tuple[Any, dict[str, tuple[int, int]]]] = {}

    def local_part(
        self, name: str, entry: ParameterLayout, tensor_rank: int, tensor_size: int, key: str = WEIGHT
    ) -> torch.Tensor:
        """The part of a parameter (or of one of its moments) that a rank of this run holds, fp32."""
        if entry.dim is None or tensor_size == self.tensor_size:
            part = self._saved_part(name, entry, 0 if entry.dim is None else tensor_rank, key)
            return part.view(entry.local_shape(tensor_size))
        parts = [self._saved_part(name, entry, rank, key) for rank in range(self.tensor_size)]
        shape = entry.local_shape(self.tensor_size)
        full = torch.cat([part.view(shape) for part in parts], dim=entry.dim)
        return entry.local_part(full, tensor_rank, tensor_size)

    def has_moments(self) -> bool:
        """Whether the optimizer had made a step."""
        return any(name.startswith("optimizer-") for name in self.manifest["files"])

    def _saved_part(self, name: str, entry: ParameterLayout, tensor_rank: int, key: str) -> torch.Tensor:
        """A saved tensor-parallel part, flat, from the fragments of its data-parallel ranks."""
        flat = torch.empty(math.prod(entry.local_shape(self.tensor_size)))
        filled = 0
        for data_rank in range(self.data_size):
            kind = "weights" if key == WEIGHT else "optimizer"
            file_name = f"{kind}-tp{tensor_rank:02d}-dp{data_rank:03d}.safetensors"
            if file_name not in self.manifest["files"]:
                continue
            file, places = self._open(file_name)
            if name in places:
                start, numel = places[name]
                flat[start : start + numel] = file.get_tensor(name if key == WEIGHT else f"{name}/{key}")
                filled += numel
        if filled != flat.numel():
            raise CheckpointError(
                f"{self.folder}: {name} has {filled} of {flat.numel()} values: the checkpoint is not whole"
            )
        return flat

    def _open(self, file_name: str) -> tuple[Any, dict[str, tuple[int, int]]]:
        if file_name not in self._files:
            file = safetensors.safe_open(self.folder / file_name, framework="pt")
            self._files[file_name] = (file, json.loads(file.metadata()["fragments"]))
        return self._files[file_name]
