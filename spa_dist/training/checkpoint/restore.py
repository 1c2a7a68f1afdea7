"""Put a checkpoint back, at this run's layout: weights before DeepSpeed is built, optimizer state after."""

from typing import Any

import torch

from spa_dist.config import Config
from spa_dist.errors import CheckpointError
from spa_dist.model import Decoder
from spa_dist.parallel.groups import Grid
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.training.checkpoint.read import Checkpoint
from spa_dist.training.engine import Engine
from spa_dist.training.fragments import MOMENTS, fragments_to_restore, prepare_moments, restore_loss_scaler
from spa_dist.training.state import TrainState

FREE_TO_CHANGE = ("attention.backend", "attention.fold")
MASK_OF_THE_MODEL = ("method", "start", "start_sparsity", "initial_probability", "l0")
"""Keys of `attention.mask` that make the model another one; its schedules, λ and the guard may change from one resume to the next."""


def check_same_model(config: Config, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` when the config means another model, or other data, than the checkpoint's."""
    saved = checkpoint.manifest["config"]
    now = config.model_dump(mode="json")
    for section in ("model", "attention"):
        before = _fixed_keys(section, saved[section])
        for dotted, value in _fixed_keys(section, now[section]).items():
            if before.get(dotted) != value:
                raise CheckpointError(
                    f"{checkpoint.folder} was trained with {dotted}={before.get(dotted)!r}, not {value!r}: "
                    "restore the key, or give the run another run.dir"
                )
    if saved["run"]["seed"] != config.run.seed:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with run.seed={saved['run']['seed']}, not {config.run.seed}: "
            "another seed is another data order; restore it, or give the run another run.dir"
        )


def _fixed_keys(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Dotted key → value of what may not change when a run goes on."""
    keys = {f"{section}.{key}": value for key, value in values.items() if key != "mask"}
    mask = values.get("mask") or {}
    keys |= {f"attention.mask.{key}": mask.get(key) for key in MASK_OF_THE_MODEL if section == "attention"}
    if section == "attention":
        keys["attention.gate"] = bool(values.get("gate"))
    return {dotted: value for dotted, value in keys.items() if dotted not in FREE_TO_CHANGE}


@torch.no_grad()
def load_weights(model: Decoder, checkpoint: Checkpoint, config: Config, grid: Grid) -> None:
    """Fill this rank's part of the model with the checkpoint's fp32 master weights."""
    tensors = model_tensors(model)
    for name, entry in parameter_layout(config).items():
        tensors[name].copy_(checkpoint.local_part(name, entry, grid.tensor_rank, grid.tensor_size))


@torch.no_grad()
def load_optimizer(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fill this rank's master weights, moments, step count and loss scale.

    DeepSpeed made its masters from weights already rounded to bf16 or fp16, so they are written again in full precision; the
    low-precision weights are the rounding of the masters and need nothing.
    """
    state: dict[str, Any] = checkpoint.manifest["state"]
    with_moments = checkpoint.has_moments() and engine.config.optimizer.name == "adamw"
    if with_moments:
        prepare_moments(engine, int(state["optimizer_steps"]))
    layout, grid = parameter_layout(engine.config), engine.grid
    for fragment in fragments_to_restore(engine):
        entry = layout[fragment.name]
        span = slice(fragment.start, fragment.start + fragment.master.numel())
        part = checkpoint.local_part(fragment.name, entry, grid.tensor_rank, grid.tensor_size)
        fragment.master.copy_(part.reshape(-1)[span])
        for key in MOMENTS if with_moments else ():
            part = checkpoint.local_part(fragment.name, entry, grid.tensor_rank, grid.tensor_size, key)
            fragment.moments[key].copy_(part.reshape(-1)[span])
    restore_loss_scaler(engine, state["loss_scaler"])


def restored_state(checkpoint: Checkpoint) -> TrainState:
    """The run's counters at the checkpoint."""
    saved = checkpoint.manifest["state"]
    return TrainState(**{key: saved[key] for key in TrainState.__dataclass_fields__})
