"""Validation loss and perplexities, and early stopping on them."""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data_pipeline.stream import EvalStream
from spa_dist.parallel.groups import data_group
from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.metrics import MetricsLog

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer


class Evaluation(Callback):
    """Evaluates before the first step, every `evaluation.every` steps, and at the end of the run."""

    def __init__(self, stream: EvalStream, log: MetricsLog):
        self._stream, self._log = stream, log
        self._evaluated_at = -1

    def on_start(self, trainer: "Trainer") -> None:
        """Evaluate the untrained model, once in a run. A checkpoint of a step at which an evaluation was due holds its result."""
        step, every = trainer.state.step, trainer.config.evaluation.every
        if step == 0:
            trainer.state.initial_loss = self._evaluate(trainer)
        elif every and step % every == 0:
            self._evaluated_at = step

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Evaluate when it is due; stop the run when `evaluation.patience` is spent."""
        every, patience = trainer.config.evaluation.every, trainer.config.evaluation.patience
        if not every or report.step % every:
            return
        self._evaluate(trainer)
        if patience is not None and trainer.state.evaluations_without_gain >= patience:
            trainer.stop_reason = f"early stopping: no better validation loss in {patience} evaluations"

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """Evaluate the last model, unless that was just done or the run was interrupted."""
        if reason != "interrupted" and self._evaluated_at != trainer.state.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: "Trainer") -> float:
        metrics = evaluate(trainer, self._stream)
        state, loss = trainer.state, metrics["loss"]
        state.validation_loss = loss
        if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
            state.best_loss, state.evaluations_without_gain = loss, 0
        elif state.step:
            state.evaluations_without_gain += 1
        self._evaluated_at = state.step
        self._log.record(trainer, {f"validation_{name}": value for name, value in metrics.items()})
        return loss


@torch.no_grad()
def evaluate(trainer: "Trainer", stream: EvalStream) -> dict[str, float]:
    """Loss and perplexities over the stream; every window counts once at each layout. Collective."""
    engine, task, device = trainer.engine, trainer.task, trainer.grid.device
    micro_size = trainer.config.evaluation.micro_size or trainer.plan.micro_size
    total = torch.zeros((), dtype=torch.float64, device=device)
    engine.deepspeed.eval()
    for inputs, targets in stream.batches(micro_size):
        total += task.loss(engine.forward, torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
    engine.deepspeed.train()
    dist.all_reduce(total, group=data_group())
    return task.metrics(float(total), stream.tokens, stream.words)
