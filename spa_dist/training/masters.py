"""Whole parameters through their fp32 masters, between two steps: read, changed, and changed in Adam's moments too.

A parameter lives in up to three places: the fp32 master (in ZeRO's partitions), Adam's moments, and the tensor that the
forward pass reads. A change has to reach all of them, on every rank.
"""

from collections.abc import Iterable

import deepspeed
import torch
import torch.distributed as dist

from spa_dist.parallel.groups import data_group
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.training.engine import Engine
from spa_dist.training.fragments import fragments_to_restore


@torch.no_grad()
def read_masters(engine: Engine, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The fp32 values of parameters of this tensor-parallel rank, by name. Collective over the data-parallel group."""
    layout, grid = parameter_layout(engine.config), engine.grid
    shapes = {name: layout[name].local_shape(grid.tensor_size) for name in names}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), device=grid.device)
    parts = dict(zip(shapes, flat.split(sizes)))
    for fragment in fragments_to_restore(engine):
        if fragment.name in parts:
            parts[fragment.name][fragment.start : fragment.start + fragment.master.numel()] = fragment.master
    if engine.config.zero_stage > 0 and grid.data_size > 1:
        dist.all_reduce(flat, group=data_group())  # each entry has one owner: a sum with zeros, exact
    return {name: parts[name].view(shape) for name, shape in shapes.items()}


@torch.no_grad()
def write_masters(engine: Engine, values: dict[str, torch.Tensor], forget: dict[str, torch.Tensor]) -> None:
    """Give parameters of this tensor-parallel rank new values, and zero Adam's moments where `forget` (bool) is true.

    Every data-parallel rank calls it with the same values.
    """
    for fragment in fragments_to_restore(engine):
        if fragment.name in values:
            span = slice(fragment.start, fragment.start + fragment.master.numel())
            fragment.master.copy_(values[fragment.name].reshape(-1)[span])
            for moment in fragment.moments.values():
                moment[forget[fragment.name].reshape(-1)[span]] = 0.0
    tensors = model_tensors(engine.model)
    parameters = {name: tensors[name] for name in values}
    with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):  # nothing to do below ZeRO 3
        for name, parameter in parameters.items():
            parameter.data.copy_(values[name])
