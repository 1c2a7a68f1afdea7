"""Train many points of a search space on Ray: `python launch/sweep.py --config sweep_dprime.json [--resume] [--address A]`.

Exit codes: 0 every trial ended; 2 the user's mistake, one line on stderr; 75 a budget ran out, or the sweep was interrupted, before every
trial had ended: run again with `--resume`, and more of the budget.
"""

import argparse
import logging

from spa_dist.cli import run_command


def main() -> int:
    """Parse, check, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or the name of a file in configs/")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="key=value", help="override the sweep config"
    )
    parser.add_argument("--address", help="of a running Ray cluster to join, or auto; default: start Ray here")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the sweep in its dir: nothing that ended runs again"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")

    from spa_dist.sweep.load import load_sweep

    overrides = [*args.set, *([f"cluster.address={args.address}"] if args.address else [])]
    sweep = load_sweep(args.config, overrides)  # before anything heavy is imported: a typo costs no start-up

    from rich.console import Console

    from spa_dist.sweep.driver import describe_sweep, run_sweep
    from spa_dist.sweep.live import table_of

    if args.dry_run:
        print(describe_sweep(sweep))
        return 0
    code, table = run_sweep(sweep, resume=args.resume)
    Console(width=None if Console().is_terminal else 200).print(table_of(table, sweep, f"{sweep.name} → {sweep.sweep_dir}"))
    return code


if __name__ == "__main__":
    run_command(main)
