"""The learning rate as a pure function of the step."""

import math

from spa_dist.config.schema import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1.

    `inverse_sqrt`: peak · min(t / t_warm, √(t_warm / t)). The paper prints η_max · min(t^-½, t · t_warm^-1.5), whose peak is
    η_max / √t_warm, 63 times less than it says; here the peak is η_max.
    """
    warmup = schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    if step < warmup:
        return peak * step / warmup
    if schedule.name == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / step)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
