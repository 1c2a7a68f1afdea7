"""Write a checkpoint: every rank its fragments, then rank 0 the manifest, whose rename is the only commit.

A folder without `manifest.json` is no checkpoint, whatever it holds. An older checkpoint is removed only after the commit.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from spa_dist.errors import TrainingError
from spa_dist.export.checkpoint import sha256_of
from spa_dist.export.manifest import FORMAT, MANIFEST
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.training.checkpoint.versions import installed_versions
from spa_dist.training.engine import Engine
from spa_dist.training.fragments import loss_scaler_state, optimizer_steps, owned_fragments
from spa_dist.training.state import TrainState

Digests = dict[str, dict[str, Any]]


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def save_checkpoint(run_dir: Path, engine: Engine, state: TrainState, tokenizer: dict[str, Any], keep: int) -> Path:
    """Write and commit the checkpoint of `state.step`, then remove all but the newest `keep`. Collective.

    Raises:
        TrainingError: on every rank, if any rank could not write; older checkpoints are untouched and no debris is left.
    """
    folder = step_folder(run_dir, state.step)
    _together(lambda: _make_empty(folder) if engine.grid.is_first else None, folder)
    digests = _together(lambda: _write_own_files(folder, engine), folder)
    manifest = _manifest(engine, state, tokenizer, {name: digest for own in digests for name, digest in own.items()})
    _together(lambda: _commit(folder, manifest) if engine.grid.is_first else None, folder)
    if engine.grid.is_first:
        remove_old(folder.parent, keep)
    return folder


def _together(action: Callable[[], Any], folder: Path) -> list[Any]:
    """Run `action` on every rank and gather what each returned; if one failed, all raise, and rank 0 removes the folder."""
    result: Any = None
    error: str | None = None
    try:
        result = action()
    except OSError as failure:
        error = f"{failure.strerror or failure}"
    except safetensors.SafetensorError as failure:
        error = str(failure)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, error))
    failed = [(rank, message) for rank, (_, message) in enumerate(outcomes) if message]
    if failed:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        rank, message = failed[0]
        raise TrainingError(
            f"checkpoint {folder} could not be written (rank {rank}: {message}); older checkpoints are intact"
        )
    return [value for value, _ in outcomes]


def _make_empty(folder: Path) -> None:
    if folder.exists():
        # A torn or damaged checkpoint of the same step: without its manifest it is none from this moment on.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_own_files(folder: Path, engine: Engine) -> Digests:
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[int, int]] = {}
    for fragment in owned_fragments(engine):
        places[fragment.name] = (fragment.start, fragment.master.numel())
        weights[fragment.name] = fragment.master
        for key, value in fragment.moments.items():
            moments[f"{fragment.name}/{key}"] = value
    for name, buffer in _untrained(engine).items():
        places[name] = (0, buffer.numel())
        weights[name] = buffer.detach().reshape(-1)
    grid = engine.grid
    suffix = f"tp{grid.tensor_rank:02d}-dp{grid.data_rank:03d}.safetensors"
    metadata = {"fragments": json.dumps(places)}
    digests = {}
    for name, tensors in ((f"weights-{suffix}", weights), (f"optimizer-{suffix}", moments)):
        if tensors:
            # Fragments are views of DeepSpeed's flat buffers; safetensors writes storage that is a tensor's own.
            own = {key: value.to("cpu", torch.float32, copy=True).contiguous() for key, value in tensors.items()}
            safetensors.torch.save_file(own, folder / name, metadata=metadata)
            digests[name] = sync_and_digest(folder / name)
    return digests


def _untrained(engine: Engine) -> dict[str, torch.Tensor]:
    """Buffers, whole, from the first data-parallel rank."""
    if engine.grid.data_rank:
        return {}
    return {name: tensor for name, tensor in model_tensors(engine.model).items() if not tensor.requires_grad}


def sync_and_digest(path: Path) -> dict[str, Any]:
    """Force a file to disk, and give its size and SHA-256 as read back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _manifest(engine: Engine, state: TrainState, tokenizer: dict[str, Any], digests: Digests) -> dict[str, Any]:
    config, grid = engine.config, engine.grid
    return {
        "format": FORMAT,
        "step": state.step,
        "tokens": state.tokens,
        "cursor": state.cursor,
        "parallel": {"tensor": grid.tensor_size, "data": grid.data_size, "zero_stage": config.zero_stage},
        "state": state.as_json() | {"optimizer_steps": optimizer_steps(engine), "loss_scaler": loss_scaler_state(engine)},
        "tokenizer": tokenizer,
        "config": config.model_dump(mode="json"),
        "layout": {name: entry.as_json() for name, entry in parameter_layout(config).items()},
        "files": dict(sorted(digests.items())),
        "versions": installed_versions(),
    }


def _commit(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    for directory in (folder, folder.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def remove_old(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` committed checkpoints, and what interrupted writes left behind before the newest."""
    folders = sorted(path for path in checkpoints.glob("step_*") if path.is_dir())
    committed = [path for path in folders if (path / MANIFEST).exists()]
    kept = set(committed[-keep:])
    for folder in folders:
        if folder not in kept and folder <= committed[-1]:
            (folder / MANIFEST).unlink(missing_ok=True)  # first: half a checkpoint must not look like one
            shutil.rmtree(folder, ignore_errors=True)
