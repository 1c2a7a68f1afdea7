"""Learning the mask of S: gates, pruning and regrowth, schedules, and the guard against collapse."""

from spa_dist.attention.masks.gates import HardConcrete, binary_concrete_mask, binary_concrete_sample
from spa_dist.attention.masks.guard import Fault, Guard
from spa_dist.attention.masks.learned import METHODS, LearnedProjection, MaskMethod
from spa_dist.attention.masks.plain import mask_penalty, set_step, update_masks
from spa_dist.attention.masks.pruning import largest, number_kept, pruned
from spa_dist.attention.masks.repair import dropped_for, repaired_support, revived_values
from spa_dist.attention.masks.report import MaskReport, effective_rank, mask_report
from spa_dist.attention.masks.schedules import PenaltySchedule, PruningSchedule, TemperatureSchedule

__all__ = [
    "METHODS",
    "Fault",
    "Guard",
    "HardConcrete",
    "LearnedProjection",
    "MaskMethod",
    "MaskReport",
    "PenaltySchedule",
    "PruningSchedule",
    "TemperatureSchedule",
    "binary_concrete_mask",
    "binary_concrete_sample",
    "dropped_for",
    "effective_rank",
    "largest",
    "mask_penalty",
    "mask_report",
    "number_kept",
    "pruned",
    "repaired_support",
    "revived_values",
    "set_step",
    "update_masks",
]
