"""Saves the run every `checkpoint.every` steps and when it ends, a signal included."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spa_dist.training.callbacks.base import Callback
from spa_dist.training.checkpoint.write import save_checkpoint

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer


class Checkpointing(Callback):
    """Stands last in the order, so that a checkpoint holds what the step's evaluation found."""

    def __init__(self, run_dir: Path, tokenizer: dict[str, Any], resumed_at: int):
        self._run_dir, self._tokenizer = run_dir, tokenizer
        self._saved_at = resumed_at

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Save when it is due."""
        every = trainer.config.checkpoint.every
        if every and report.step % every == 0:
            self._save(trainer)

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """Save the last state, unless that was just done."""
        if trainer.state.step and self._saved_at != trainer.state.step:
            self._save(trainer)

    def _save(self, trainer: "Trainer") -> None:
        save_checkpoint(self._run_dir, trainer.engine, trainer.state, self._tokenizer, trainer.config.checkpoint.keep)
        self._saved_at = trainer.state.step
