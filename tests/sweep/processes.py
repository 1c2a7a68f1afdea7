"""Counts how long the processes of a sweep's trials live after their trial was stopped, and runs the command as a process."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from spa_dist.sweep.ledger import read_events
from tests.distributed import ROOT


def start_sweep(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """`launch/sweep.py` as a process of its own."""
    command = [sys.executable, "launch/sweep.py", "--config", str(config), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """What the sweep in this folder has written down."""
    return list(read_events(folder / "events.jsonl"))


def wait_for(
    folder: Path, wanted: Callable[[dict[str, Any]], bool], process: subprocess.Popen[str], timeout: float = 240.0
) -> None:
    """Return once an event is there; fail with the command's output when it ends before."""
    deadline = time.monotonic() + timeout
    while not any(wanted(event) for event in events_of(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"exit {process.returncode}: {process.communicate()[0][-3000:]}")
        time.sleep(0.02)


def finish(process: subprocess.Popen[str], timeout: float = 400.0) -> str:
    """The output of a command that ends well."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, output[-3000:]
    return output


def workers(folder: Path) -> list[dict[str, Any]]:
    """Every process that ever trained for the sweep in this folder."""
    found = []
    for path in (folder / "trials").glob("*/processes.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def is_alive(worker: dict[str, Any]) -> bool:
    """Whether this very process lives, not one that got its number."""
    try:
        process = psutil.Process(worker["pid"])
        return process.create_time() == worker["created"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Watch(threading.Thread):
    """While it runs, notes for each worker of a stopped trial when it was last seen alive."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self._folder, self._over = folder, threading.Event()
        self.survived: dict[tuple[str, int], float] = {}
        """(trial, process) → seconds that it was seen alive after its trial was told to stop, or had said its last."""

    def run(self) -> None:
        """Look five times a second."""
        while not self._over.wait(0.2):
            self.look()

    def look(self) -> None:
        """One look at all processes."""
        now, events = time.time(), events_of(self._folder)
        told: dict[str, float] = {}
        for event in events:
            if event["event"] == "start":
                told.pop(event["trial"], None)
            elif event["event"] in ("verdict", "end") and event["trial"] not in told:
                told[event["trial"]] = event["time"]
        for worker in workers(self._folder):
            name = worker["trial"]
            if name in told and worker["time"] < told[name]:
                key = (name, worker["pid"])
                self.survived.setdefault(key, 0.0)
                if is_alive(worker):
                    self.survived[key] = now - told[name]

    def stop(self) -> dict[tuple[str, int], float]:
        """The longest that each was seen."""
        self._over.set()
        self.join()
        self.look()
        return self.survived
