"""Run the jobs that are not finished yet, several at a time, each in a process of its own with one thread."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spa_dist.comparison.jobs import Job, Results, write_result

END_SECONDS = 10.0
"""After SIGTERM."""


class Worker:
    """A process that forks for each job, so that imports are paid for once. SIGTERM ends it and what it runs."""

    def __init__(self, task: str, scratch: Path):
        with (scratch / "workers.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spa_dist.comparison.child", task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
                text=True,
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Where its answers come from, for select."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def ask(self, folder: Path) -> None:
        """Start the job of a folder."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `answer` says so
            self.process.stdin.write(f"{folder}\n")
            self.process.stdin.flush()

    def answer(self) -> int | None:
        """The job's exit code; None where the worker itself has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return int(line) if line else None

    def end(self) -> None:
        """End it and what it runs."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@dataclass
class Running:
    """A job on its way."""

    job: Job
    worker: Worker
    folder: Path
    began: float


class Runner:
    """Runs jobs in order; whatever ends it, a file in `raw/` is whole.

    budget_seconds: no job starts that, by the mean of those before, would end later. finished(job): called after each.
    """

    def __init__(
        self,
        results: Results,
        settings: dict[str, Any],
        *,
        data: Path | None,
        workers: int,
        budget_seconds: float | None,
        finished: Callable[[], None],
        say: Callable[[str], None],
    ):
        self._results, self._settings, self._data = results, settings, data
        self._workers, self._budget = workers, budget_seconds
        self._finished, self._say = finished, say
        self._durations: list[float] = []
        self.failed: list[str] = []
        """One line for each job that did not end well."""

    def run(self, jobs: Sequence[Job]) -> int:
        """Run what is not finished; returns how many jobs are left for another time."""
        waiting = [job for job in jobs if not self._results.has(job, self._settings)]
        self._say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them finished before")
        began, running, idle = time.monotonic(), dict[Worker, Running](), list[Worker]()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                while running or waiting:
                    while waiting and len(running) < self._workers and self._has_time(began):
                        worker = idle.pop() if idle else Worker(waiting[0].task, Path(scratch))
                        running[worker] = self._start(waiting.pop(0), worker, Path(scratch))
                    if not running:
                        break
                    for worker in select.select(list(running), [], [])[0]:
                        done, code = running.pop(worker), worker.answer()
                        if code is None:
                            worker.end()
                        else:
                            idle.append(worker)
                        self._finish(done, code, len(waiting) + len(running))
            finally:
                for worker in (*running, *idle):
                    worker.end()
        return len(waiting)

    def _has_time(self, began: float) -> bool:
        if self._budget is None:
            return True
        expected = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return time.monotonic() - began + expected < self._budget

    def _start(self, job: Job, worker: Worker, scratch: Path) -> Running:
        folder = scratch / job.name
        folder.mkdir()
        data = str(self._data.resolve()) if self._data else None
        spec = {"job": asdict(job), "settings": self._settings, "data": data}
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        worker.ask(folder)
        return Running(job, worker, folder, time.monotonic())

    def _finish(self, done: Running, code: int | None, left: int) -> None:
        seconds = time.monotonic() - done.began
        self._durations.append(seconds)
        remaining = left * sum(self._durations) / len(self._durations) / self._workers
        clock = f"{seconds:.0f} s; {left} to go, about {duration(remaining)}"
        output = done.folder / "result.json"
        log = done.folder.parent / "workers.txt" if code is None else done.folder / "log.txt"
        if code == 0 and output.exists():
            result = json.loads(output.read_text(encoding="utf-8"))
            result["process_seconds"] = seconds
            write_result(self._results.path(done.job), done.job, self._settings, result)
            self._say(f"{done.job.title}: {outcome(result)}; {clock}")
            self._finished()
        else:
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            last = (text.strip().splitlines() or ["no output"])[-1]
            reason = "its worker died" if code is None else f"exit code {code}"
            self.failed.append(f"{done.job.title}: {reason}: {last}")
            self._say(f"failed: {self.failed[-1]}; {clock}")


def outcome(result: dict[str, Any]) -> str:
    """The number that a run is for."""
    final = result["final"]
    if "token_perplexity" in final:
        return f"perplexity {final['token_perplexity']:.2f}"
    solved = final["solved_at"]
    return f"accuracy {final['accuracy']:.4f}, {'not solved' if solved is None else f'solved at step {solved}'}"


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 1 h 40 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
