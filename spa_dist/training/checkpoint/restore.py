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

FREE_TO_CHANGE = {"attention.backend", "attention.fold"}
"""Keys of the sections model and attention that do not change what the model is."""


def check_same_model(config: Config, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` when the config means another model, or other data, than the checkpoint's."""
    saved = checkpoint.manifest["config"]
    now = config.model_dump(mode="json")
    for section in ("model", "attention"):
        for key, value in now[section].items():
            dotted = f"{section}.{key}"
            if dotted not in FREE_TO_CHANGE and saved[section].get(key) != value:
                raise CheckpointError(
                    f"{checkpoint.folder} was trained with {dotted}={saved[section].get(key)!r}, not {value!r}: "
                    "restore the key, or give the run another run.dir"
                )
    if saved["run"]["seed"] != config.run.seed:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with run.seed={saved['run']['seed']}, not {config.run.seed}: "
            "another seed is another data order; restore it, or give the run another run.dir"
        )


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
