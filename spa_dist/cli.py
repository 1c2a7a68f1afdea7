"""What every command shares: a user's mistake is one line on stderr and exit code 2."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spa_dist.errors import TrainingError, UserError

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_TRAINING_ERROR = 3
EXIT_INTERRUPTED = 75
"""A signal asked the run to stop, and a checkpoint was saved (`EX_TEMPFAIL` of sysexits.h: run it again)."""
EXIT_KEYBOARD = 130
"""Ctrl-C, as shells report it."""

_OTHER_RANKS_WAIT_SECONDS = 5.0


def run_command(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with its return code; a `UserError` becomes one line on stderr and exit code 2, a
    `TrainingError` one line and exit code 3.

    Under a launcher every rank meets the same mistake. Rank 0 of the machine speaks; the others wait for the launcher to end
    them, and speak only if it does not, which is when the mistake is theirs alone (a file missing on one machine).
    """
    try:
        code = main()
    except (UserError, TrainingError) as error:
        if int(os.environ.get("LOCAL_RANK", "0")) != 0:
            time.sleep(_OTHER_RANKS_WAIT_SECONDS)
        command = Path(sys.argv[0]).name
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_TRAINING_ERROR)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(EXIT_KEYBOARD)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(code or EXIT_OK)


def share_cores() -> None:
    """Give each process of this machine its share of the cores, before torch starts its threads.

    Two processes with a thread per core each wait for one another at every product (seen: six times slower). An
    OMP_NUM_THREADS that the user set stands.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
