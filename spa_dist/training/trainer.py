"""The training loop: stream → batch → loss → backward → step → callbacks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from spa_dist.config import BatchPlan, Config
from spa_dist.errors import TrainingError
from spa_dist.parallel.groups import Grid, data_group
from spa_dist.tasks import LanguageModelling
from spa_dist.training.callbacks.base import Callback
from spa_dist.training.engine import Engine, StepOutcome
from spa_dist.training.masks.penalty import GatePenalty
from spa_dist.training.schedule import learning_rate
from spa_dist.training.signals import StopRequest
from spa_dist.training.state import TrainState

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step; equal on every rank, except `loss_sum` (this rank's) and the times."""

    step: int
    loss_sum: torch.Tensor
    """Sum of losses over this data-parallel rank's valid targets; a tensor, so that nothing waits for the device."""
    valid_tokens: int
    """Valid targets of the global batch."""
    lr: float
    outcome: StepOutcome
    seconds: float
    data_wait_seconds: float

    def mean_loss(self) -> float:
        """Mean loss over the global batch. Collective over the data-parallel group."""
        total = self.loss_sum.to(torch.float64).reshape(1)
        dist.all_reduce(total, group=data_group())
        return float(total) / max(1, self.valid_tokens)


class Trainer:
    """Runs steps until the plan, a callback or a signal ends the run."""

    def __init__(
        self,
        config: Config,
        plan: BatchPlan,
        grid: Grid,
        engine: Engine,
        task: LanguageModelling,
        stream: Iterator[tuple[np.ndarray, np.ndarray]],
        epoch_samples: int,
        state: TrainState,
        callbacks: Sequence[Callback],
        stop_request: StopRequest,
    ):
        self.config, self.plan, self.grid, self.engine, self.task = config, plan, grid, engine, task
        self.state, self.callbacks, self.stop_request = state, list(callbacks), stop_request
        self._stream, self.epoch_samples = stream, epoch_samples
        self.stop_reason: str | None = None
        self._penalty = GatePenalty(config, engine.model)

    def run(self) -> str:
        """Train, and say why it ended: "finished", "interrupted", or what a callback gave."""
        try:
            return self._run()
        finally:
            for callback in self.callbacks:
                callback.close()

    def _run(self) -> str:
        for callback in self.callbacks:
            callback.on_start(self)
        while self.stop_reason is None and self.state.step < self.plan.steps:
            report = self._step()
            if report is None:
                self.stop_reason = "interrupted"
                break
            for callback in self.callbacks:
                callback.on_step(self, report)
        reason = self.stop_reason or "finished"
        for callback in self.callbacks:
            callback.on_end(self, reason)
        return reason

    def _step(self) -> StepReport | None:
        """One optimizer step; None when a signal on any rank asked to stop."""
        began = time.perf_counter()
        micro_batches = [self._to_device(next(self._stream)) for _ in range(self.plan.accumulation_steps)]
        waited = time.perf_counter() - began
        valid_tokens, stop = self._agree(sum(self.task.valid_targets(targets) for _, targets in micro_batches))
        if stop:
            return None
        step = self.state.step + 1
        lr = learning_rate(step, self.config.optimizer.lr, self.config.schedule, self.plan.steps)
        loss_sum = torch.zeros((), device=self.grid.device)
        outcome = None
        for index, (inputs, targets) in enumerate(micro_batches):
            noise = self.engine.model.noise
            noise.step, noise.micro_batch = step, (step - 1) * self.plan.accumulation_steps + index
            loss = self.task.loss(self.engine.forward, inputs, targets)
            self.engine.backward(loss, valid_tokens, self._penalty.take(step))
            loss_sum += loss.detach()
            outcome = self.engine.step(lr)
        assert outcome is not None
        self._advance(step, valid_tokens, outcome)
        return StepReport(step, loss_sum, valid_tokens, lr, outcome, time.perf_counter() - began, waited)

    def _agree(self, valid_tokens: int) -> tuple[int, bool]:
        """Valid tokens of the global batch, and whether any rank was asked to stop; one small all-reduce."""
        own = torch.tensor([valid_tokens, int(self.stop_request.is_set())], device=self.grid.device)
        dist.all_reduce(own)
        return int(own[0]) // self.grid.tensor_size, bool(own[1])

    def _advance(self, step: int, valid_tokens: int, outcome: StepOutcome) -> None:
        state, optimizer = self.state, self.config.optimizer
        state.step = step
        state.cursor += self.plan.global_size
        state.tokens += valid_tokens
        if not outcome.skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        what = (
            f"step {step} (samples {state.cursor - self.plan.global_size} to {state.cursor - 1}): the gradient is not finite"
        )
        if optimizer.nonfinite == "stop" and self.config.precision.dtype != "fp16":
            raise TrainingError(f"{what}; nothing was changed by it, and optimizer.nonfinite=stop ends the run")
        if state.skipped_in_a_row >= optimizer.max_skipped:
            raise TrainingError(f"{what}; it is the {state.skipped_in_a_row}th such step in a row (optimizer.max_skipped)")

    def _to_device(self, batch: tuple[np.ndarray, np.ndarray]) -> MicroBatch:
        inputs, targets = (torch.from_numpy(part).to(self.grid.device, non_blocking=True) for part in batch)
        return inputs, targets
