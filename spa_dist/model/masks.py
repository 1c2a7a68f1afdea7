"""The mask section of the config in the words of `spa_dist.attention.masks`, and the learned parts of a model."""

from collections.abc import Iterator

import torch
from torch import nn

from spa_dist.attention.masks import (
    Guard,
    LearnedProjection,
    MaskMethod,
    PenaltySchedule,
    PruningSchedule,
    TemperatureSchedule,
)
from spa_dist.config import Config


def mask_method(config: Config) -> MaskMethod | None:
    """How M is trained, or None where the pattern of S is fixed."""
    mask = config.attention.mask
    if not config.attention.learns_mask or mask is None:
        return None
    hard_concrete = mask.l0.model_dump() if mask.l0 else {}
    return MaskMethod(
        mask.method, temperature_schedule(config), initial_probability=mask.initial_probability, **hard_concrete
    )


def temperature_schedule(config: Config) -> TemperatureSchedule:
    """Of the Gumbel gates."""
    section = config.attention.mask.gumbel if config.attention.mask else None
    if section is None:
        return TemperatureSchedule()
    assert section.last_step is not None
    return TemperatureSchedule(
        section.temperature, section.final_temperature, section.first_step, section.last_step, section.schedule
    )


def pruning_schedule(config: Config) -> PruningSchedule | None:
    """Of a magnitude mask."""
    mask = config.attention.mask
    if mask is None or mask.magnitude is None:
        return None
    section = mask.magnitude
    assert section.last_step is not None
    return PruningSchedule(
        config.attention.sparsity, section.first_step, section.last_step, mask.every, section.schedule, section.regrow
    )


def penalty_schedule(config: Config) -> PenaltySchedule:
    """λ of the gate probability; nothing without gates."""
    mask, method = config.attention.mask, mask_method(config)
    if mask is None or method is None or not method.has_gates:
        return PenaltySchedule()
    return PenaltySchedule(mask.l0_lambda, mask.l0_warmup_steps)


def guard(config: Config) -> Guard:
    """The ranges of a healthy S."""
    section = config.attention.mask.guard if config.attention.mask else None
    return Guard() if section is None else Guard(**section.model_dump(exclude={"action"}))


def learned_projections(model: nn.Module) -> Iterator[tuple[str, LearnedProjection]]:
    """Each learned S and the name of its tensors in a checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, LearnedProjection):
            yield name, module


def take_gate_probability(model: nn.Module) -> torch.Tensor | None:
    """Σ P(gate ≠ 0) of this rank's gates, from the last training forward pass, in its graph; None where there are no gates."""
    found = []
    for _, projection in learned_projections(model):
        if projection.expected_nonzeros is not None:
            found.append(projection.expected_nonzeros)
            projection.expected_nonzeros = None
    return torch.stack(found).sum() if found else None
