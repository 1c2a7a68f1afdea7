"""Runs the jobs of one worker, each in a fork of a process that has everything imported: `python -m spa_dist.comparison.child TASK`.

Each line of standard input is the folder of a job with its `spec.json`: `job`, `settings`, `data`. The fork writes `result.json` and
`log.txt` there; its exit code, or minus the signal that ended it, is a line of standard output, which has nothing else.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from spa_dist.cli import run_command
from spa_dist.comparison.jobs import Job
from spa_dist.comparison.tasks import run_job

IMPORTS = {"lm": ("spa_dist.training.engine", "spa_dist.training.run"), "recall": ("spa_dist.comparison.recall.train",)}


def main() -> None:
    """Import, then fork for each line."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print
    torch.set_num_threads(1)
    for module in IMPORTS[sys.argv[1]]:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(run_in(Path(line.rstrip("\n"))))
        try:
            _, status = os.waitpid(child, 0)
        except SystemExit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run_in(folder: Path) -> int:
    """Run the job of a folder; returns an exit code."""
    with (folder / "log.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def run() -> None:
        spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
        result = run_job(Job(**spec["job"]), spec["settings"], Path(spec["data"]) if spec["data"] else None)
        (folder / "result.json").write_text(json.dumps(result, allow_nan=False), encoding="utf-8")

    code = 1
    try:
        run_command(run)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
