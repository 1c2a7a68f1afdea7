"""One update of every magnitude mask of the model (Algorithm 2, lines 7 and 8), the same on every rank."""

import hashlib

import torch
import torch.distributed as dist

from spa_dist.attention.masks import LearnedProjection, PruningSchedule, number_kept, pruned
from spa_dist.errors import TrainingError
from spa_dist.parallel.groups import data_group
from spa_dist.training.engine import Engine
from spa_dist.training.masters import read_masters, write_masters

Projections = dict[str, LearnedProjection]


def update_masks(
    engine: Engine, projections: Projections, schedule: PruningSchedule, step: int, initial_sparsity: float, *, skipped: bool
) -> None:
    """Prune by the fp32 masters and regrow by ∇_S of the step just made, over its micro-batches and data-parallel ranks.

    What leaves the mask is set to zero with its Adam moments, so that whatever grows again starts from zero. After a skipped
    step, whose gradient is not finite, nothing grows. Collective over the data-parallel group.
    """
    weights = read_masters(engine, [f"{name}.weight" for name in projections])
    gradients = _gradients(projections) if schedule.regrow and not skipped else None
    values, forget = {}, {}
    for name, projection in projections.items():
        weight = weights[f"{name}.weight"]
        kept = number_kept(schedule.sparsity(step, initial_sparsity), weight[0].numel())
        mask, survivors = pruned(
            weight,
            projection.mask.bool(),
            gradients[name] if gradients else None,
            kept=kept,
            regrown=round(schedule.regrow_share(step) * kept),
        )
        projection.mask.copy_(mask)
        values[f"{name}.weight"], forget[f"{name}.weight"] = weight * survivors, ~survivors
    write_masters(engine, values, forget)
    check_agreement(projections, step)


def _gradients(projections: Projections) -> dict[str, torch.Tensor] | None:
    """∇_S summed over data-parallel ranks; the sum over tensor-parallel ranks was made in the backward pass."""
    found = [projection.dense_gradient for projection in projections.values()]
    own = [gradient for gradient in found if gradient is not None]
    if len(own) != len(found):
        return None
    flat = torch.cat([gradient.reshape(-1) for gradient in own])
    dist.all_reduce(flat, group=data_group())
    parts = flat.split([gradient.numel() for gradient in own])
    return {name: part.view(gradient.shape) for name, part, gradient in zip(projections, parts, own)}


def check_agreement(projections: Projections, step: int) -> None:
    """Raise `TrainingError` on every rank when data-parallel ranks hold different masks: they no longer train one model."""
    digest = hashlib.sha256()
    for projection in projections.values():
        digest.update(projection.mask.bool().cpu().numpy().tobytes())
    own = int.from_bytes(digest.digest()[:7], "little")
    bounds = torch.tensor([own, -own], device=next(iter(projections.values())).mask.device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=data_group())
    if int(bounds[0]) != -int(bounds[1]):
        raise TrainingError(
            f"step {step}: data-parallel ranks hold different masks, which one machine's arithmetic can cause; "
            "resume from the last checkpoint"
        )
