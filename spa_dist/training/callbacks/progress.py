"""A progress bar with the time that remains, on stderr of the first rank."""

import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.metrics import MetricsLog

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer


class Progress(Callback):
    """Steps done, time left, and the last logged loss; where stderr is no terminal, a line every half minute."""

    def __init__(self, log: MetricsLog):
        self._bar: tqdm | None = None
        self._shown: dict[str, str] = {}
        log.subscribe(self._receive)

    def on_start(self, trainer: "Trainer") -> None:
        """Show the bar, from where a resumed run goes on."""
        if trainer.grid.is_first:
            interval = 0.5 if sys.stderr.isatty() else 30.0
            self._bar = tqdm(
                total=trainer.plan.steps,
                initial=trainer.state.step,
                desc=trainer.config.run.name,
                unit="step",
                mininterval=interval,
                maxinterval=2 * interval,
                dynamic_ncols=True,
            )
            self._bar.set_postfix(self._shown)

    def _receive(self, line: dict[str, Any]) -> None:
        if "loss" in line:
            self._shown |= {"loss": f"{line['loss']:.4f}", "tok/s": f"{line['tokens_per_second']:,.0f}"}
        if "validation_loss" in line:
            self._shown["val"] = f"{line['validation_loss']:.4f}"
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """One step further."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            self._bar.close()
