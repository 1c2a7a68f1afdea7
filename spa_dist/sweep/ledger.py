"""events.jsonl: everything that a sweep decided and heard, one JSON object a line, on disk before anything follows from it.

The state of a sweep is what these lines say and nothing else, so that a sweep that was killed goes on from the file alone.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from spa_dist.errors import DataError

Event = dict[str, Any]


class Ledger:
    """Appends events; one process at a time has it open."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{path} is held by a sweep that still runs: wait for it, or stop it") from None
        _drop_torn_line(path)

    def append(self, event: Event) -> None:
        """Write one event and force it to disk."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order; a last line that a kill cut short is left out."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise DataError(
                    f"{path} is damaged at line {number}: restore it, or start the sweep in another dir"
                ) from None


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without its end, so that the next event starts a line of its own."""
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1
    if kept < len(content):
        with path.open("r+b") as file:
            file.truncate(kept)
