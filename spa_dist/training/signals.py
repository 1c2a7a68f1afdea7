"""SIGTERM and SIGINT ask the run to stop after the step that it is in; a second one stops it at once."""

import signal
import threading
from types import FrameType


class StopRequest:
    """Set by a signal; every rank learns of it at the next step."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def is_set(self) -> bool:
        """Whether this process was asked to stop."""
        return self._signal is not None

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT from here on. Off the main thread, where Python takes no handlers, the signals stay with
        whoever owns the process: a run inside another program's worker is ended by that program."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signal = number
