"""What the driver hands to a trial: plain JSON, so that any process can read it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAILURE = "failure.json"
"""In a run's folder: what the run itself said was wrong."""


@dataclass(frozen=True)
class TrialSpec:
    """One attempt at a trial, from its newest checkpoint to `stop_at`."""

    trial: str
    run_dir: str
    config: dict[str, Any]
    """The resolved run config."""
    stop_at: int
    """Tokens."""
    report_tokens: int
    mailbox: str
    """Name of the actor that answers a report."""
    donor_checkpoints: str | None
    """Folder of checkpoints whose newest one, of `donor_step`, is taken over first."""
    donor_step: int
    scaling: dict[str, Any]
    retries: int
    timeout_seconds: float

    @property
    def folder(self) -> Path:
        """Folder of the trial's run."""
        return Path(self.run_dir)

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> "TrialSpec":
        """From JSON."""
        return TrialSpec(**json.loads(text))
