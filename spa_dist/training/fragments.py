"""The fp32 master weights and Adam moments that this rank owns, as fragments of named parameters.

DeepSpeed keeps them in flat partitions whose shape depends on the ZeRO stage. Seen as (name, start, numel) fragments of the
flattened tensor-parallel shard they depend on nothing, so a checkpoint of fragments can be read at any stage and size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from spa_dist.parallel.layout import model_tensors
from spa_dist.training.engine import Engine

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Fragment:
    """Part of one parameter that this rank owns. The tensors are 1-D fp32 views of the optimizer's memory."""

    name: str
    start: int
    master: torch.Tensor
    moments: dict[str, torch.Tensor]


def owned_fragments(engine: Engine) -> Iterator[Fragment]:
    """Every fragment that this rank is to write. Over the data-parallel ranks they tile each shard exactly."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _stage3(engine)
    elif hasattr(optimizer, "single_partition_of_fp32_groups") or hasattr(optimizer, "fp32_groups_flat_partition"):
        yield from _stage12(engine)
    elif engine.grid.data_rank == 0:
        yield from _unpartitioned(engine)


def fragments_to_restore(engine: Engine) -> Iterator[Fragment]:
    """Every fragment that this rank holds: as `owned_fragments`, and at ZeRO 0 on every data-parallel rank."""
    if engine.config.zero_stage > 0:
        yield from owned_fragments(engine)
    else:
        yield from _unpartitioned(engine)


def _parameters(engine: Engine) -> dict[str, nn.Parameter]:
    tensors = model_tensors(engine.model)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter) and tensor.requires_grad}


def _stage12(engine: Engine) -> Iterator[Fragment]:
    """From DeepSpeed's map of parameters to flat partitions. Its map of moments is not used: it is made after the step of the
    first parameter group, and has none for the groups that follow."""
    optimizer = engine.optimizer
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    for name, parameter in _parameters(engine).items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            place = mapping.hp_fragment_address
            state = optimizer.optimizer.state.get(flats[mapping.param_group_index], {})
            moments = {key: state[key].narrow(0, place.start, place.numel) for key in MOMENTS if key in state}
            yield Fragment(name, mapping.lp_fragment_address.start, mapping.hp_fragment.detach(), moments)


def _stage3(engine: Engine) -> Iterator[Fragment]:
    optimizer = engine.optimizer
    for name, parameter in _parameters(engine).items():
        group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = numel * engine.grid.data_rank
        real = max(0, min(numel, parameter.ds_numel - start))  # type: ignore[attr-defined]  # the last partition is padded
        if real:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            state = optimizer.optimizer.state.get(flat, {})
            moments = {key: state[key].narrow(0, offset, real) for key in MOMENTS if key in state}
            yield Fragment(name, start, flat.detach().narrow(0, offset, real), moments)


def _unpartitioned(engine: Engine) -> Iterator[Fragment]:
    masters = _masters_of_unfused(engine)
    state = inner_optimizer(engine).state
    for name, parameter in _parameters(engine).items():
        master = masters.get(id(parameter), parameter)
        moments = {key: state[master][key].view(-1) for key in MOMENTS if key in state.get(master, {})}
        yield Fragment(name, 0, master.detach().view(-1), moments)


def _masters_of_unfused(engine: Engine) -> dict[int, torch.Tensor]:
    """id of a low-precision parameter → its fp32 master, for DeepSpeed's unpartitioned mixed-precision optimizer."""
    low, high = getattr(engine.optimizer, "fp16_groups", []), getattr(engine.optimizer, "fp32_groups", [])
    return {id(p): master for lows, highs in zip(low, high) for p, master in zip(lows, highs)}


def inner_optimizer(engine: Engine) -> torch.optim.Optimizer:
    """torch's optimizer inside DeepSpeed's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _state_keys(engine: Engine) -> list[torch.Tensor]:
    """The tensors under which torch's optimizer keeps its state."""
    optimizer = engine.optimizer
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    if hasattr(optimizer, "fp32_groups"):
        return [master for group in optimizer.fp32_groups for master in group]
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_steps(engine: Engine) -> int:
    """Updates that Adam has made; its bias correction depends on them."""
    state = inner_optimizer(engine).state
    steps = {int(state[key]["step"]) for key in _state_keys(engine) if "step" in state.get(key, {})}
    assert len(steps) <= 1, steps
    return steps.pop() if steps else 0


def prepare_moments(engine: Engine, steps: int) -> None:
    """Give Adam the state that it would have after `steps` updates, with moments of zero for `fragments_to_restore` to fill."""
    inner = inner_optimizer(engine)
    if not isinstance(inner, torch.optim.AdamW):
        return
    for key in _state_keys(engine):
        inner.state[key] = {
            "step": torch.tensor(float(steps), device=key.device),
            **{moment: torch.zeros_like(key) for moment in MOMENTS},
        }


def loss_scaler_state(engine: Engine) -> dict[str, float | int]:
    """DeepSpeed's dynamic loss scale and its counters; empty where there is none."""
    holder = _scale_holder(engine)
    return (
        {}
        if holder is None
        else {key: getattr(holder, key) for key in _SCALE_FIELDS if getattr(holder, key, None) is not None}
    )


def restore_loss_scaler(engine: Engine, state: dict[str, float | int]) -> None:
    """Put back what `loss_scaler_state` gave."""
    holder = _scale_holder(engine)
    if holder is not None:
        for key, value in state.items():
            setattr(holder, key, value)


_SCALE_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scale_holder(engine: Engine) -> object | None:
    if engine.config.precision.dtype != "fp16":
        return None
    return getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
