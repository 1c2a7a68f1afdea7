"""One run in a process of its own: `python -m spa_dist.comparison.child SPEC.json`, started by `runner`.

SPEC holds `job`, `settings`, `data` and `output`, the file that the result is written to.
"""

import json
import sys
from pathlib import Path

from spa_dist.cli import run_command
from spa_dist.comparison.jobs import Job
from spa_dist.comparison.tasks import run_job


def main() -> int:
    """Run the job, write its result."""
    import torch

    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = run_job(Job(**spec["job"]), spec["settings"], Path(spec["data"]) if spec["data"] else None)
    Path(spec["output"]).write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
