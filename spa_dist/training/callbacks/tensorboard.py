"""The metrics log as TensorBoard scalars."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.metrics import MetricsLog

if TYPE_CHECKING:
    from spa_dist.training.trainer import Trainer

_NOT_SCALARS = {"step", "time"}


class TensorBoard(Callback):
    """Writes each line of the metrics log under `train/` or `validation/`; `purge_step` hides what a resumed run repeats."""

    def __init__(self, folder: Path, log: MetricsLog):
        self._folder = folder
        self._writer: Any = None
        log.subscribe(self._receive)

    def on_start(self, trainer: "Trainer") -> None:
        """Open the event file on the first rank."""
        if trainer.grid.is_first:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports that no other rank needs

            self._writer = SummaryWriter(str(self._folder), purge_step=trainer.state.step + 1)
            self._writer.add_text("config", f"```json\n{trainer.config.model_dump_json(indent=2)}\n```", trainer.state.step)

    def _receive(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if key not in _NOT_SCALARS and isinstance(value, int | float):
                name = key.replace("validation_", "validation/", 1) if key.startswith("validation_") else f"train/{key}"
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
