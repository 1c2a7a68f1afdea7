"""The table of points: live on a terminal, a line per change elsewhere."""

import json
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from spa_dist.sweep.control import Control
from spa_dist.sweep.results import Row, rows
from spa_dist.sweep.schema import SweepConfig

REFRESH_SECONDS = 1.0


def table_of(table: Sequence[Row], sweep: SweepConfig, title: str = "", limit: int | None = None) -> Table:
    """The points, best first."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("point", justify="right")
    for key in sweep.space:
        shown.add_column(key.rpartition(".")[2])
    for name in ("status", "tokens", "seeds", "val loss", "±", "tok/s", "FLOPs/tok", "cache B/tok"):
        shown.add_column(name, justify="left" if name == "status" else "right")
    for row in table[:limit]:
        shown.add_row(
            f"{row.point}{'*' if row.front else ''}",
            *(_value(row.values.get(key)) for key in sweep.space),
            row.status,
            f"{row.tokens:,}",
            str(row.seeds),
            _number(row.metrics["validation_loss"], ".4f"),
            _number(row.loss_deviation, ".4f"),
            _number(row.metrics["tokens_per_second"], ",.0f"),
            _number(row.metrics["flops_per_token"], ".3g"),
            _number(row.metrics["cache_bytes_per_token"], ",.0f"),
        )
    return shown


def _value(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))[:40]
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


class Display:
    """Shows a sweep while it runs, and has its files written when something changed."""

    def __init__(self, control: Control, on_change: Callable[[], None]):
        self._control, self._on_change = control, on_change
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._last = 0.0
        self._said: dict[str, tuple[str, int]] = {}
        self.began = time.monotonic()

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.refresh(now=True)
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def refresh(self, now: bool = False) -> None:
        """Show and write what changed, at most once a second."""
        if not self._control.changed or (not now and time.monotonic() - self._last < REFRESH_SECONDS):
            return
        self._control.changed = False
        self._last = time.monotonic()
        self._on_change()
        if self._live is not None:
            table = rows(self._control.state, self._control.sweep)
            self._live.update(table_of(table, self._control.sweep, self._title(), self._console.height - 6), refresh=True)
        else:
            self._say_changes()

    def _title(self) -> str:
        state = self._control.state
        running = len(self._control.running)
        return f"{self._control.sweep.name}: {len(state.trials)} trials, {running} running, {state.tokens():,} tokens"

    def _say_changes(self) -> None:
        for trial in self._control.state.trials.values():
            now = (trial.status, trial.tokens)
            if trial.status == "waiting" or self._said.get(trial.name) == now:
                continue
            self._said[trial.name] = now
            loss = trial.reports.get(trial.tokens, {}).get("validation_loss")
            text = f"{trial.name}: {trial.status} at {trial.tokens:,} tokens"
            text += f", validation loss {loss:.4f}" if loss is not None else ""
            text += f" ({trial.reason})" if trial.reason else ""
            print(text, flush=True)
