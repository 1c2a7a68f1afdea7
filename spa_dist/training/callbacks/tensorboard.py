"""The metrics log as TensorBoard scalars."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.metrics import MetricsLog

if TYPE_CHECKING:
    from spa_dist.training.trainer import Trainer

_NOT_SCALARS = {"step", "time"}
_FOLDERS = ("validation", "mask")


def _tag(key: str) -> str:
    """validation_loss → validation/loss; mask_density → mask/density; loss → train/loss."""
    folder, _, rest = key.partition("_")
    return f"{folder}/{rest}" if folder in _FOLDERS else f"train/{key}"


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
            if key not in _NOT_SCALARS:
                self._scalars(_tag(key), value, line["step"])

    def _scalars(self, tag: str, value: Any, step: int) -> None:
        """A number, or one for each layer, or for each head of each layer."""
        if isinstance(value, int | float):
            self._writer.add_scalar(tag, value, step)
        elif isinstance(value, list):
            for index, part in enumerate(value):
                self._scalars(f"{tag}/{index}", part, step)

    def image(self, tag: str, image_hwc: torch.Tensor, step: int) -> None:
        """A picture: uint8 [height, width, 3]. Nothing on other ranks than the first."""
        if self._writer is not None:
            self._writer.add_image(tag, image_hwc, step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
