"""Mask training as the trainer sees it: updates, the guard, and what is logged of S and its gates."""

from typing import TYPE_CHECKING, Any

import torch

from spa_dist.attention.masks import MaskReport
from spa_dist.config import Config
from spa_dist.model.build import initial_sparsity
from spa_dist.model.masks import (
    learned_projections,
    mask_method,
    penalty_schedule,
    pruning_schedule,
    temperature_schedule,
)
from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.metrics import MetricsLog
from spa_dist.training.callbacks.tensorboard import TensorBoard
from spa_dist.training.masks.guarding import MaskGuard
from spa_dist.training.masks.images import projection_image
from spa_dist.training.masks.snapshot import Snapshot, take_snapshot
from spa_dist.training.masks.update import update_masks

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer

GATE_ONLY_EVERY = 100
"""Steps between looks at the gates of a model whose S is not learned."""


class MaskTraining(Callback):
    """Updates magnitude masks when they are due; every `attention.mask.every` steps looks at S, guards it and logs it.

    It stands before Evaluation and Checkpointing, which then see the mask that the next step starts with.
    """

    def __init__(self, config: Config, log: MetricsLog, tensorboard: TensorBoard | None):
        self._config, self._log, self._tensorboard = config, log, tensorboard
        self._method, self._schedule = mask_method(config), pruning_schedule(config)
        if self._method is None or self._method.name != "magnitude":
            self._schedule = None
        mask = config.attention.mask
        self._every = mask.every if mask else GATE_ONLY_EVERY
        self._initial_sparsity = initial_sparsity(config)
        self._supports: dict[str, torch.Tensor] = {}

    @staticmethod
    def wanted(config: Config) -> bool:
        """Whether a run has anything for it to do."""
        return config.attention.learns_mask or bool(config.attention.gate)

    def on_start(self, trainer: "Trainer") -> None:
        """Look at S as it starts; get ready for an update after the first step."""
        self._projections = dict(learned_projections(trainer.engine.model))
        self._guard = MaskGuard(self._config, self._projections)
        if trainer.state.step == 0:
            self._look(trainer)
        elif trainer.state.step % self._every == 0 or self._schedule:
            self._supports = take_snapshot(trainer.engine, self._projections).supports
        self._prepare(trainer.state.step + 1)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Update, look, and get ready for the next step."""
        due = self._schedule is not None and self._schedule.due(report.step)
        if self._schedule is not None and due:
            update_masks(
                trainer.engine,
                self._projections,
                self._schedule,
                report.step,
                self._initial_sparsity,
                skipped=report.outcome.skipped,
            )
        if due or report.step % self._every == 0 or report.step == trainer.plan.steps:
            self._look(trainer)
        self._prepare(report.step + 1)

    def _prepare(self, step: int) -> None:
        """∇_S is kept in the steps that an update with regrowth follows, and in no other."""
        collect = self._schedule is not None and self._schedule.regrow > 0 and self._schedule.due(step)
        for projection in self._projections.values():
            projection.collects_gradient, projection.dense_gradient = collect, None

    def _look(self, trainer: "Trainer") -> None:
        snapshot = take_snapshot(trainer.engine, self._projections)
        snapshot, reports, faults = self._guard.look(trainer.engine, snapshot, trainer.state.step)
        self._log.record(trainer, self._line(trainer.state.step, snapshot, reports) | {"mask_faults": faults})
        self._supports = snapshot.supports
        if self._tensorboard is not None and trainer.grid.is_first:
            for name, projection in snapshot.projections.items():
                self._tensorboard.image(f"S/{name}", projection_image(projection), trainer.state.step)

    def _line(self, step: int, snapshot: Snapshot, reports: dict[str, MaskReport]) -> dict[str, Any]:
        """Lists hold one value for each layer, `mask_gates` one for each head of each layer."""
        line: dict[str, Any] = {}
        if reports:
            line = {f"mask_{key}": [getattr(report, key) for report in reports.values()] for key in _REPORTED}
            line["mask_churn"] = [self._churn(name, support) for name, support in snapshot.supports.items()]
        if snapshot.gates:
            line["mask_gates"] = [gates.tolist() for gates in snapshot.gates.values()]
        if self._schedule is not None:
            line["mask_target_sparsity"] = self._schedule.sparsity(step, self._initial_sparsity)
        if self._method is not None and self._method.has_gates:
            line["mask_lambda"] = penalty_schedule(self._config).at(step)
            line["mask_open_probability"] = [
                float(self._method.probability(parts["mask_logits"]).mean()) for parts in snapshot.tensors.values()
            ]
        if self._method is not None and self._method.name == "gumbel":
            line["mask_temperature"] = temperature_schedule(self._config).at(step)
        return line

    def _churn(self, name: str, support: torch.Tensor) -> float | None:
        """Share of S's entries that went on or off since the last look; None at the first."""
        before = self._supports.get(name)
        return None if before is None else float((before != support).double().mean())


_REPORTED = ("density", "rank", "effective_rank", "empty_rows", "empty_columns")
