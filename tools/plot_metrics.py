"""Draw a run's loss curve: `python tools/plot_metrics.py runs/spa_tiny/metrics.jsonl [more …] --output loss.png`."""

import argparse
import json
from pathlib import Path

from spa_dist.cli import run_command
from spa_dist.errors import DataError


def main() -> int:
    """Read the logs, draw training and validation loss against tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", metavar="METRICS.JSONL")
    parser.add_argument("--output", required=True, metavar="FILE.png")
    args = parser.parse_args()
    runs = {name: _lines(Path(name)) for name in args.metrics}

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, lines in runs.items():
        label = f"{Path(name).parent.name} " if len(runs) > 1 else ""
        steps = [(line["tokens"] / 1e6, line["loss"]) for line in lines if line.get("loss") is not None]
        held_out = [
            (line["tokens"] / 1e6, line["validation_loss"]) for line in lines if line.get("validation_loss") is not None
        ]
        (curve,) = axes.plot(*zip(*steps), linewidth=1, alpha=0.6, label=f"{label}training")
        axes.plot(*zip(*held_out), "o-", color=curve.get_color(), label=f"{label}validation")
    axes.set(xlabel="tokens (millions)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=130)
    print(f"loss curve: {args.output}")
    return 0


def _lines(path: Path) -> list[dict]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a metrics log: {error}") from None
    if not any("loss" in line for line in lines):
        raise DataError(f"{path} has no training step to draw")
    return lines


if __name__ == "__main__":
    run_command(main)
