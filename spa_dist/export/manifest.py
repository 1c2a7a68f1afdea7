"""The manifest of a checkpoint: found, parsed and bounded before anything in it is believed.

Nothing in a checkpoint is executed: its manifest is JSON, its tensors are in the safetensors format.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spa_dist.errors import CheckpointError

FORMAT = "spa_dist.checkpoint/1"
MANIFEST = "manifest.json"
WEIGHTS_FILE = re.compile(r"weights-tp(\d{2,})-dp(\d{3,})\.safetensors")
_SPLIT_DIM = {"replicated": None, "column": 0, "row": 1, "vocabulary": 0, "per_head": 0}
_MAX_BYTES = 1 << 28
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One row of the layout table: the full shape, and the dimension that tensor parallelism splits (None: replicated)."""

    kind: str
    shape: tuple[int, ...]
    dim: int | None
    buffer: bool


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `files`: name → (bytes, SHA-256). `tree` is the whole JSON object."""

    folder: Path
    step: int
    tokens: int
    tensor_size: int
    data_size: int
    config: dict[str, Any]
    layout: dict[str, Entry]
    files: dict[str, tuple[int, str]]
    tokenizer: dict[str, Any]
    tree: dict[str, Any]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that `path` means: one itself, RUN or RUN/checkpoints (the newest step), or RUN/<step>."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    for folder in (path / "checkpoints", path):
        steps = [step for step in folder.glob("step_*") if (step / MANIFEST).is_file() and step.name[5:].isdecimal()]
        if steps:
            return max(steps, key=lambda step: int(step.name[5:]))
    step = path.name.removeprefix("step_")
    if step.isdecimal():
        named = path.parent / "checkpoints" / f"step_{int(step):08d}"
        if (named / MANIFEST).is_file():
            return named
    raise CheckpointError(f"no checkpoint at {path}: give a run's folder, RUN/<step>, or a folder that holds {MANIFEST}")


def read_manifest(folder: Path) -> Manifest:
    """Parse `folder`/manifest.json. Raises CheckpointError, in one line, for anything that a trainer would not write."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is too large to be a manifest")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: the checkpoint is damaged, use another step") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    try:
        return _parse(folder, tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} at {error}; use another step") from None


def _parse(folder: Path, tree: dict[str, Any]) -> Manifest:
    tensor_size = _integer(tree["parallel"]["tensor"], 1, _MAX_RANKS, "parallel.tensor")
    data_size = _integer(tree["parallel"]["data"], 1, _MAX_RANKS, "parallel.data")
    if not isinstance(tree["config"], dict):
        raise ValueError("config")
    return Manifest(
        folder=folder,
        step=_integer(tree["step"], 0, 2**63, "step"),
        tokens=_integer(tree["tokens"], 0, 2**63, "tokens"),
        tensor_size=tensor_size,
        data_size=data_size,
        config=tree["config"],
        layout={name: _entry(name, entry, tensor_size) for name, entry in tree["layout"].items()},
        files={name: _file(name, entry) for name, entry in tree["files"].items()},
        tokenizer=_tokenizer(tree["tokenizer"]),
        tree=tree,
    )


def _entry(name: str, entry: dict[str, Any], tensor_size: int) -> Entry:
    kind, dim = entry["kind"], entry["dim"]
    shape = tuple(_integer(size, 1, 2**40, f"layout of {name}") for size in entry["shape"])
    if kind not in _SPLIT_DIM or dim != _SPLIT_DIM[kind] or math.prod(shape) > 2**44:
        raise ValueError(f"layout of {name}")
    if dim is not None and (dim >= len(shape) or shape[dim] % tensor_size):
        raise ValueError(f"layout of {name}")
    return Entry(kind, shape, dim, bool(entry["buffer"]))


def _file(name: str, entry: dict[str, Any]) -> tuple[int, str]:
    if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise ValueError(f"files: {name!r} is not a file of the folder")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        raise ValueError(f"files: {name!r} has no SHA-256")
    return _integer(entry["bytes"], 0, 2**60, f"files: {name!r}"), entry["sha256"]


def _tokenizer(entry: dict[str, Any]) -> dict[str, Any]:
    _file(entry["file"], {"bytes": 0, "sha256": entry["sha256"]})
    _integer(entry["eos_id"], 0, 2**31, "tokenizer.eos_id")
    _integer(entry["vocab_size"], 1, 2**31, "tokenizer.vocab_size")
    return entry


def _integer(value: Any, low: int, high: int, where: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(where)
    return value
