"""metrics.jsonl: a JSON object per logged step and per evaluation, floats in full precision."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spa_dist.model.flops import training_flops_per_token
from spa_dist.training.callbacks.base import Callback
from spa_dist.training.hardware import peak_flops, peak_memory_bytes

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer


class MetricsLog(Callback):
    """Writes the log, and hands each line to those who `subscribe`.

    `tokens_per_second` and `mfu` cover the steps since the last line, evaluations and checkpoints left out. MFU is model FLOPs
    (`spa_dist.model.flops`) over time, devices and their dense peak; null where the peak is not known.
    """

    def __init__(self, path: Path):
        self._path = path
        self._subscribers: list[Any] = []
        self._seconds = self._waited = 0.0
        self._tokens = 0

    def subscribe(self, receive: Any) -> None:
        """`receive(line)` gets each line on the first rank, after it is written."""
        self._subscribers.append(receive)

    def on_start(self, trainer: "Trainer") -> None:
        """Drop what an interrupted run logged after the checkpoint that this one goes on from."""
        if trainer.grid.is_first:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            keep_lines_up_to(self._path, trainer.state.step)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Log every `logging.every` steps, the first, the last, and each skipped step. Collective when it logs."""
        self._seconds += report.seconds
        self._waited += report.data_wait_seconds
        self._tokens += report.valid_tokens
        due = (
            report.step % trainer.config.logging.every == 0
            or report.step in (1, trainer.plan.steps)
            or report.outcome.skipped
        )
        if not due:
            return
        loss = report.mean_loss()
        line = self._step_line(trainer, report, loss) if trainer.grid.is_first else {}
        self._seconds = self._waited = 0.0
        self._tokens = 0
        self._write(trainer, line)

    def record(self, trainer: "Trainer", metrics: dict[str, Any]) -> None:
        """Log a line of its own: an evaluation, or the state of the masks."""
        self._write(trainer, {"step": trainer.state.step, "tokens": trainer.state.tokens, **metrics})

    def _step_line(self, trainer: "Trainer", report: "StepReport", loss: float) -> dict[str, Any]:
        config, grid = trainer.config, trainer.grid
        rate = self._tokens / self._seconds
        flops = training_flops_per_token(config) * rate
        peak = peak_flops(config, grid.device)
        return {
            "step": report.step,
            "tokens": trainer.state.tokens,
            "loss": loss,
            "lr": report.lr,
            "grad_norm": report.outcome.grad_norm,
            "skipped": report.outcome.skipped,
            "skipped_steps": trainer.state.skipped_steps,
            "loss_scale": report.outcome.loss_scale,
            "tokens_per_second": rate,
            "model_tflops_per_second": flops / 1e12,
            "mfu": flops / (peak * grid.tensor_size * grid.data_size) if peak else None,
            "step_seconds": report.seconds,
            "data_wait_seconds": self._waited,
            "peak_memory_bytes": peak_memory_bytes(grid.device),
            "epoch": trainer.state.cursor / trainer.epoch_samples,
        }

    def _write(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        if not trainer.grid.is_first:
            return
        line = {"time": time.time(), **line}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({key: _finite(value) for key, value in line.items()}) + "\n")
        for receive in self._subscribers:
            receive(line)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off by a crash is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def keep_lines_up_to(path: Path, step: int) -> None:
    """Rewrite a metrics file without the lines after `step`; what they recorded will be run again."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
