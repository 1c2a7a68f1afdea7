"""What every layer's S and gates are at this moment, whole, on every rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from spa_dist.attention.masks import LearnedProjection
from spa_dist.parallel.groups import tensor_group
from spa_dist.parallel.layout import parameter_layout
from spa_dist.training.engine import Engine
from spa_dist.training.masters import read_masters


@dataclass(frozen=True)
class Snapshot:
    """fp32 tensors, all heads of the model, by the name of a layer's S or gate in a checkpoint."""

    tensors: dict[str, dict[str, torch.Tensor]]
    """Name of S → what it is made of (`weight`, `mask` or `mask_logits`)."""
    projections: dict[str, torch.Tensor]
    """Name of S → S with its deterministic mask [heads or 1, d_k, d_k′]."""
    supports: dict[str, torch.Tensor]
    """Name of S → which entries are on (bool); one that has just regrown is on, and zero."""
    gates: dict[str, torch.Tensor]
    """Name of a layer's gate → exp(g) [heads]."""


def take_snapshot(engine: Engine, projections: dict[str, LearnedProjection]) -> Snapshot:
    """Read the masters and put tensor-parallel parts together. Collective over all ranks."""
    layout = parameter_layout(engine.config)
    gates = [name for name in layout if name.endswith("attention.gate")]
    parameters = [f"{name}.{key}" for name, p in projections.items() for key, _ in p.named_parameters()]
    local = read_masters(engine, [*parameters, *gates])
    for name, projection in projections.items():
        for key, buffer in projection.named_buffers():
            local[f"{name}.{key}"] = buffer.float()
    full = {name: _whole(tensor, split=layout[name].dim is not None) for name, tensor in local.items()}
    tensors = {name: {key: full[f"{name}.{key}"] for key in p.tensors()} for name, p in projections.items()}
    masks = {name: projections[name].method.final_mask(parts) for name, parts in tensors.items()}
    return Snapshot(
        tensors,
        {name: parts["weight"] * masks[name] for name, parts in tensors.items()},
        {name: mask != 0 for name, mask in masks.items()},
        {name: full[name].exp() for name in gates},
    )


def _whole(tensor: torch.Tensor, *, split: bool) -> torch.Tensor:
    group = tensor_group()
    if not split or group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
