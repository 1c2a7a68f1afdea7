"""Train a model: `deepspeed launch/pretrain.py --config spa_tiny.json [--set section.key=value …] [--resume auto] [--dry-run]`.

Exit codes: 0 finished; 2 the user's mistake, one line on stderr; 3 the run cannot go on (non-finite gradients, a checkpoint
that cannot be written); 75 stopped by SIGTERM or SIGINT after saving a checkpoint: run again with `--resume auto`.
"""

import argparse
import logging
import os

from spa_dist.cli import run_command, share_cores


def main() -> int:
    """Parse, check, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or the name of a file in configs/")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="section.key=value", help="override the config"
    )
    parser.add_argument(
        "--resume", choices=["auto"], help="go on from the newest intact checkpoint of run.dir, if there is one"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    first = os.environ.get("RANK", "0") == "0"
    logging.getLogger("spa_dist").setLevel(logging.INFO if first else logging.ERROR)
    share_cores()

    from spa_dist.config import load_config

    config = load_config(args.config, args.set)  # before anything heavy is imported: a typo costs no start-up

    from spa_dist.parallel.groups import Launch
    from spa_dist.training.run import dry_run, train

    launch = Launch.from_environment()
    if args.dry_run:
        plan = dry_run(config, launch)
        if launch.rank == 0:
            print(plan)
        return 0
    return train(config, launch, resume=args.resume == "auto")


if __name__ == "__main__":
    run_command(main)
