"""Draw what a run does step by step: `python tools/plot_schedule.py --config spa_learned.json [--set …] --output schedule.png`.

Learning rate, and for a learned S the target sparsity with its updates and regrowth, the temperature and λ, as the run will
follow them: after the config is resolved.
"""

import argparse
from collections.abc import Callable

from spa_dist.cli import run_command

Curve = tuple[str, Callable[[int], float]]


def main() -> int:
    """Load the config, evaluate its schedules, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or the name of a file in configs/")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="section.key=value")
    parser.add_argument("--output", default="schedule.png", metavar="FILE.png")
    args = parser.parse_args()

    from spa_dist.config import load_config
    from spa_dist.config.batch import total_steps

    config = load_config(args.config, args.set)

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from spa_dist.training.schedule_curves import schedule_curves

    steps = total_steps(config)
    grid = sorted({1 + round(i * (steps - 1) / 1000) for i in range(1001)})
    curves, updates = schedule_curves(config)
    figure, axes = pyplot.subplots(
        len(curves), 1, figsize=(8, 2.2 * len(curves)), sharex=True, layout="constrained", squeeze=False
    )
    for axis, (label, at) in zip(axes[:, 0], curves.items()):
        axis.plot(grid, [at(step) for step in grid])
        if label in ("sparsity", "regrown share"):
            axis.plot(updates, [at(step) for step in updates], ".", markersize=3, label=f"{len(updates)} updates")
            axis.legend()
        axis.set(ylabel=label)
        axis.grid(alpha=0.3)
    axes[-1, 0].set(xlabel="step")
    figure.savefig(args.output, dpi=130)
    for label, at in curves.items():
        print(f"{label:16} step 1: {at(1):.4g}   half: {at(max(1, steps // 2)):.4g}   step {steps}: {at(steps):.4g}")
    print(f"schedules of {steps:,} steps: {args.output}")
    return 0


if __name__ == "__main__":
    run_command(main)
