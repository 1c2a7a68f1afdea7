"""λ times the probability that gates are open: what drives a mask of gates towards zeros."""

import math

import torch

from spa_dist.config import Config
from spa_dist.model import Decoder
from spa_dist.model.masks import penalty_schedule, take_gate_probability
from spa_dist.parallel.layout import parameter_layout


class GatePenalty:
    """λ_t · mean P(gate ≠ 0) over all gates of the model, or λ_t · Σ P(gate ≠ 0) with `l0_reduction: "sum"`.

    On a tensor-parallel rank it covers the gates that the rank holds: each gate's gradient is whole where the gate is, and
    nothing has to be summed.
    """

    def __init__(self, config: Config, model: Decoder):
        self._model, self._schedule = model, penalty_schedule(config)
        mask = config.attention.mask
        self._count = 1
        if mask is not None and mask.l0_reduction == "mean":
            self._count = max(1, gate_count(config))

    def take(self, step: int) -> torch.Tensor | None:
        """The penalty of the forward pass just made, in its graph; None without gates."""
        nonzeros = take_gate_probability(self._model)
        return None if nonzeros is None else nonzeros * (self._schedule.at(step) / self._count)


def gate_count(config: Config) -> int:
    """Gates of the whole model."""
    layout = parameter_layout(config)
    return sum(math.prod(entry.shape) for name, entry in layout.items() if name.endswith(".mask_logits"))
