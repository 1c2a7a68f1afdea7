"""Mask training in a plain PyTorch loop:

for step in range(1, steps + 1):
    set_step(model, step, schedule)                      # noise, temperature; whether ∇_S is kept
    loss = task(model(x)) + penalty_schedule.at(step) * mask_penalty(model)
    loss.backward()
    optimizer.step()
    update_masks(model, step, schedule, optimizer)       # magnitude masks, when the schedule says so
    optimizer.zero_grad()
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spa_dist.attention.masks.learned import LearnedProjection
from spa_dist.attention.masks.pruning import number_kept, pruned
from spa_dist.attention.masks.schedules import PruningSchedule

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _projections(model: nn.Module) -> Iterator[LearnedProjection]:
    return (module for module in model.modules() if isinstance(module, LearnedProjection))


def set_step(model: nn.Module, step: int, schedule: PruningSchedule | None = None) -> None:
    """Tell every learned S which optimizer step begins, counted from 1, and whether its gradient will be asked for."""
    for projection in _projections(model):
        projection.step = step
        projection.collects_gradient = schedule is not None and schedule.regrow > 0 and schedule.due(step)
        projection.dense_gradient = None


def mask_penalty(model: nn.Module, *, reduction: str = "mean") -> Tensor:
    """Mean P(gate ≠ 0) over the gates of the last training forward pass, or their sum; 0 where there are none."""
    found = [p for p in _projections(model) if p.expected_nonzeros is not None]
    if not found:
        return torch.zeros(())
    total = torch.stack([p.expected_nonzeros for p in found if p.expected_nonzeros is not None]).sum()
    return total if reduction == "sum" else total / sum(p.mask_logits.numel() for p in found)


@torch.no_grad()
def update_masks(
    model: nn.Module,
    step: int,
    schedule: PruningSchedule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    initial_sparsity: float = 0.0,
) -> bool:
    """Prune and regrow every magnitude mask if an update is due after this step; returns whether one was.

    initial_sparsity: share of zeros that S started with. optimizer: its moments of entries outside the mask are zeroed too.
    """
    if not schedule.due(step):
        return False
    for projection in _projections(model):
        if projection.method.name != "magnitude":
            continue
        weight = projection.weight
        kept = number_kept(schedule.sparsity(step, initial_sparsity), weight[0].numel())
        new, survivors = pruned(
            weight,
            projection.mask.bool(),
            projection.dense_gradient,
            kept=kept,
            regrown=round(schedule.regrow_share(step) * kept),
        )
        projection.mask.copy_(new)
        weight.mul_(survivors)
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        for moment in _MOMENTS:
            if isinstance(state.get(moment), Tensor):
                state[moment].mul_(survivors)
    return True
