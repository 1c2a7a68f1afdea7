"""Train every kind of attention on one task, over several seeds, and write tables: mean ± std, paired tests, parameters, FLOPs.

    python data_pipeline/prepare.py --source pg19 --input PG19 --output data/pg19_2k --vocab-size 2048
    python tools/compare_attention.py --task lm --data data/pg19_2k --output docs/results/comparison
    python tools/compare_attention.py --task recall --output docs/results/comparison

PG19 is a folder with train/, validation/ and test/ of PG-19's books. Every finished run is one file in OUTPUT/raw/; the command can be
stopped at any time and goes on where it stopped. Seed 0 of every variant is run before seed 1, and ablations come last. After each run
OUTPUT/TASK.md, .json and .png are written. Exit codes: 0 all runs are finished; 2 a mistake to put right; 3 a run failed; 75 the budget
ended first: run it again.
"""

import argparse
import signal
import sys
from pathlib import Path

from spa_dist.cli import EXIT_INTERRUPTED, EXIT_OK, run_command
from spa_dist.comparison.jobs import Results
from spa_dist.comparison.report import write_report
from spa_dist.comparison.runner import Runner
from spa_dist.comparison.tasks import TASKS, task_jobs, task_settings
from spa_dist.errors import ConfigError, TrainingError


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", required=True, choices=TASKS)
    add("--output", required=True, type=Path, metavar="FOLDER")
    add("--data", type=Path, metavar="DATASET", help="prepared text, for --task lm")
    add("--workers", type=int, default=2, help="runs at a time, one thread each (%(default)s)")
    add("--budget-minutes", type=float, help="start no run that would end later than this")
    add("--seeds", type=int, default=3, help="runs of each variant (%(default)s)")
    add("--only", metavar="PART", help="only variants whose name contains this")
    add("--steps", type=int, help="optimizer steps of a run in place of the task's own")
    add("--learning-rate", type=float, help="peak rate in place of the task's own")
    args = parser.parse_args()
    for name in ("workers", "seeds", "steps", "learning_rate", "budget_minutes"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    changes = {name: getattr(args, name) for name in ("steps", "learning_rate") if getattr(args, name) is not None}
    settings = task_settings(args.task, args.data, **changes)
    results = Results(args.output)
    runner = Runner(
        results,
        settings,
        data=args.data,
        workers=args.workers,
        budget_seconds=args.budget_minutes and args.budget_minutes * 60,
        finished=lambda: write_report(results, args.task),
        say=lambda line: print(line, flush=True),
    )
    left = runner.run(task_jobs(args.task, args.only, args.seeds))
    for path in write_report(results, args.task):
        print(path)
    if runner.failed:
        raise TrainingError(f"{len(runner.failed)} runs failed, the first: {runner.failed[0]}")
    return EXIT_INTERRUPTED if left else EXIT_OK


if __name__ == "__main__":
    run_command(main)
