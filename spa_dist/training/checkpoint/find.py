"""Choose what to resume from: the newest checkpoint that verifies, agreed on by all ranks before any of them loads."""

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import sha256_of
from spa_dist.export.manifest import FORMAT, MANIFEST
from spa_dist.training.checkpoint.read import Checkpoint

logger = logging.getLogger(__name__)


def newest_good_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint of a run whose every file has the size and SHA-256 of its manifest; None if the run has none.

    Ranks share the hashing. A bad checkpoint is named in the log and passed over. Collective.

    Raises:
        CheckpointError: there are checkpoints, and none is good.
    """
    folders = sorted((run_dir / "checkpoints").glob("step_*"), reverse=True)
    candidates = [folder for folder in folders if (folder / MANIFEST).is_file()]
    candidates = _from_rank_0(candidates)
    faults = []
    for folder in candidates:
        fault = _agree_on_fault(folder)
        if fault is None:
            return Checkpoint(folder, read_manifest(folder))
        faults.append(fault)
        if dist.get_rank() == 0:
            logger.warning("checkpoint passed over: %s", fault)
    if faults:
        raise CheckpointError(f"no checkpoint under {run_dir} is intact ({faults[0]}): move it away, or use another run.dir")
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. `CheckpointError` when it cannot be read or is of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}")
    return manifest


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _agree_on_fault(folder: Path) -> str | None:
    """The first fault that any rank finds in its share of the files, or None; the same answer on every rank."""
    try:
        fault = _own_fault(folder)
    except CheckpointError as error:
        fault = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fault)
    return next((each for each in found if each), None)


def _own_fault(folder: Path) -> str | None:
    files = sorted(read_manifest(folder)["files"].items())
    for name, expected in files[dist.get_rank() :: dist.get_world_size()]:
        fault = file_fault(folder / name, expected)
        if fault:
            return fault
    return None


def file_fault(path: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint, or None."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        return f"{path} has {size} bytes instead of {expected['bytes']}"
    return None if sha256_of(path) == expected["sha256"] else f"{path} does not have the SHA-256 of its manifest"
