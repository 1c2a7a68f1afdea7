"""What a sweep knows: points, trials, reports. Built by applying the ledger's events in order, live and after a kill alike."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from spa_dist.sweep.ledger import Event
from spa_dist.sweep.space import Values

Status = Literal["waiting", "running", "finished", "stopped", "unfinished", "crashed", "infeasible"]


@dataclass
class Point:
    """One point of the space."""

    index: int
    values: Values
    warmup_tokens: int = 0
    """Until when its sparsity schedule runs."""
    infeasible: str | None = None


@dataclass
class Trial:
    """A point trained with one seed."""

    name: str
    point: int
    seed: int
    status: Status = "waiting"
    """`stopped`: by the scheduler, early. `unfinished`: by the budget or an interval's end; goes on from its checkpoint."""
    reason: str = ""
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Tokens → what was reported there."""
    attempts: int = 0
    seconds: float = 0.0
    """Time that workers were held, over all attempts that ended."""
    started: float | None = None

    @property
    def tokens(self) -> int:
        """How far it came."""
        return max(self.reports, default=0)

    def loss_at(self, tokens: int) -> float:
        """Validation loss at a report; infinite where it was not finite."""
        loss = self.reports[tokens]["validation_loss"]
        return math.inf if loss is None or not math.isfinite(loss) else float(loss)


@dataclass
class State:
    """The sweep's memory; `apply` is the only way that it changes."""

    points: list[Point] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)
    first_reports: dict[int, list[str]] = field(default_factory=dict)
    """Tokens → trials in the order in which they first reported there."""
    exploits: list[Event] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    """Interval ends, in tokens, whose exchanges are all decided."""
    wall_seconds: float = 0.0
    """Of the sessions that ended, however they did."""
    session_start: float | None = None
    last_event: float = 0.0

    def apply(self, event: Event) -> None:
        """Take in one event of the ledger."""
        getattr(self, f"_on_{event['event']}")(event)
        self.last_event = event["time"]

    def _on_session(self, event: Event) -> None:
        if self.session_start is not None:
            self.wall_seconds += self.last_event - self.session_start
        self.session_start = event["time"]
        for trial in self.trials.values():
            if trial.started is not None:  # the session before was killed
                trial.seconds += max(0.0, self.last_event - trial.started)
                trial.started, trial.status = None, "unfinished"

    def _on_point(self, event: Event) -> None:
        assert event["point"] == len(self.points)
        self.points.append(Point(event["point"], event["values"], event.get("warmup_tokens", 0), event.get("infeasible")))

    def _on_trial(self, event: Event) -> None:
        self.trials[event["trial"]] = Trial(event["trial"], event["point"], event["seed"])

    def _on_start(self, event: Event) -> None:
        trial = self.trials[event["trial"]]
        trial.status, trial.started, trial.reason = "running", event["time"], ""
        trial.attempts += 1

    def _on_report(self, event: Event) -> None:
        tokens, name = event["tokens"], event["trial"]
        seen = self.first_reports.setdefault(tokens, [])
        if name not in seen:
            seen.append(name)
        self.trials[name].reports[tokens] = {k: v for k, v in event.items() if k not in ("event", "time", "trial")}

    def _on_retry(self, event: Event) -> None:
        self.trials[event["trial"]].attempts += 1

    def _on_verdict(self, event: Event) -> None:
        """A running trial was told to stop; it says so itself when it has."""

    def _on_exploit(self, event: Event) -> None:
        self.exploits.append(event)
        self.points[event["point"]].values = event["values"]

    def _on_settled(self, event: Event) -> None:
        self.settled.add(event["tokens"])

    def _on_end(self, event: Event) -> None:
        trial = self.trials[event["trial"]]
        if trial.started is not None:
            trial.seconds += event["time"] - trial.started
        trial.started, trial.status, trial.reason = None, event["status"], event.get("reason", "")

    def of_point(self, index: int) -> list[Trial]:
        """The trials of a point."""
        return [trial for trial in self.trials.values() if trial.point == index]

    def worker_seconds(self, now: float) -> float:
        """Time that trials have held their workers."""
        return sum(
            trial.seconds + (now - trial.started if trial.started is not None else 0.0) for trial in self.trials.values()
        )

    def tokens(self) -> int:
        """Tokens trained on, by the trials' last reports."""
        return sum(trial.tokens for trial in self.trials.values())
