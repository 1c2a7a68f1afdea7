"""Run the jobs that are not finished yet, several at a time, each in a process with one thread."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from spa_dist.comparison.jobs import Job, Results, write_result

POLL_SECONDS = 0.05


@dataclass
class Running:
    """A job on its way."""

    job: Job
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: IO[bytes]
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
        began, running = time.monotonic(), list[Running]()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                while running or waiting:
                    while waiting and len(running) < self._workers and self._has_time(began):
                        running.append(self._start(waiting.pop(0), Path(scratch)))
                    if not running:
                        break
                    time.sleep(POLL_SECONDS)
                    for done in [one for one in running if one.process.poll() is not None]:
                        running.remove(done)
                        self._finish(done, len(waiting) + len(running))
            finally:
                for one in running:
                    one.process.kill()
                    one.process.wait()
                    one.log.close()
        return len(waiting)

    def _has_time(self, began: float) -> bool:
        if self._budget is None:
            return True
        expected = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return time.monotonic() - began + expected < self._budget

    def _start(self, job: Job, scratch: Path) -> Running:
        folder = scratch / job.name
        folder.mkdir()
        data = str(self._data.resolve()) if self._data else None
        spec = {"job": asdict(job), "settings": self._settings, "data": data, "output": str(folder / "result.json")}
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        log = (folder / "log.txt").open("w+b")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        process = subprocess.Popen(
            [sys.executable, "-m", "spa_dist.comparison.child", str(folder / "spec.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        return Running(job, process, folder, log, time.monotonic())

    def _finish(self, done: Running, left: int) -> None:
        seconds = time.monotonic() - done.began
        self._durations.append(seconds)
        remaining = left * sum(self._durations) / len(self._durations) / self._workers
        clock = f"{seconds:.0f} s; {left} to go, about {duration(remaining)}"
        output = done.folder / "result.json"
        if done.process.returncode == 0 and output.exists():
            result = json.loads(output.read_text(encoding="utf-8"))
            result["process_seconds"] = seconds
            write_result(self._results.path(done.job), done.job, self._settings, result)
            self._say(f"{done.job.title}: {outcome(result)}; {clock}")
            self._finished()
        else:
            done.log.seek(0)
            lines = done.log.read().decode(errors="replace").strip().splitlines() or ["no output"]
            self.failed.append(f"{done.job.title}: exit code {done.process.returncode}: {lines[-1]}")
            self._say(f"failed: {self.failed[-1]}; {clock}")
        done.log.close()


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
