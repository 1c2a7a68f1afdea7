"""What a run knows besides its weights; saved in each checkpoint."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Counters of a run. The data cursor is the number of samples consumed, over all ranks."""

    step: int = 0
    tokens: int = 0
    """Valid targets trained on."""
    cursor: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_loss: float | None = None
    """Best validation loss so far."""
    evaluations_without_gain: int = 0
    initial_loss: float | None = None
    """Validation loss before the first step."""
    validation_loss: float | None = None
    """Last validation loss."""

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        return asdict(self)
