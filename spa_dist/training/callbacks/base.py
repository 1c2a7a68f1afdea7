"""What a callback may do. Callbacks run in the order they were given, on every rank, since they may call collectives."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer


class Callback:
    """Does nothing at each of its moments; subclasses fill in theirs."""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of this process."""

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """After each optimizer step."""

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """After the last step, on an orderly end only."""

    def close(self) -> None:
        """Release what is held, however the run ended; no collectives here."""
