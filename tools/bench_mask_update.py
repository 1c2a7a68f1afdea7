"""What mask training costs: the time of an update (with its look at S, the guard and the log) as a share of the steps between two.

    python tools/bench_mask_update.py --config spa_tiny --output docs/results/mask_update.json

The real trainer on made-up tokens, one process, on the CPU or the GPU that is there. Updates are made every 5 steps here to
have many of them; the share is that at the config's own interval. Steps with a mask are compared with steps of a trained S
without one, in turns.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from spa_dist.cli import run_command, share_cores

METHODS: dict[str, list[str]] = {
    "trained S, no mask": ["attention.trainable=true"],
    "magnitude": [
        "attention.pattern=learned",
        "attention.mask.method=magnitude",
        'attention.mask.magnitude={"regrow": 0.3}',
    ],
    "gumbel": ["attention.pattern=adaptive", "attention.mask.method=gumbel", "attention.mask.gumbel={}"],
    "l0": ["attention.pattern=learned", "attention.mask.method=l0", "attention.mask.l0={}"],
}
EVERY = 5


def main() -> int:
    """Time each method's steps and updates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="spa_tiny")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", metavar="FILE.json")
    args = parser.parse_args()
    share_cores()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: _Run(args.config, [*args.set, *changes], Path(folder) / str(i))
            for i, (name, changes) in enumerate(METHODS.items())
        }
        for _ in range(args.rounds):
            for run in runs.values():
                run.advance()
    results = {name: run.result() for name, run in runs.items()}
    plain = results["trained S, no mask"]["step_seconds"]
    print(f"{'':20} {'s/step':>8} {'of no mask':>11} {'update, ms':>11} {'share at interval':>18}")
    for name, row in results.items():
        row["step_ratio"] = statistics.median(a / b for a, b in zip(row["steps"], results["trained S, no mask"]["steps"]))
        share = "" if row["share"] is None else f"{row['share']:.3%} of {row['every']}"
        update = "" if row["update_seconds"] is None else f"{row['update_seconds'] * 1e3:.2f}"
        print(f"{name:20} {row['step_seconds']:>8.3f} {row['step_ratio']:>11.3f} {update:>11} {share:>18}")
    if args.output:
        report = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "config": args.config,
            "plain": plain,
            "results": results,
        }
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


class _Run:
    """A trainer that is taken `EVERY` steps further at a time."""

    def __init__(self, name: str, overrides: list[str], folder: Path):
        import numpy as np
        import torch

        from spa_dist.config import load_config, plan_batches, with_vocabulary
        from spa_dist.model import build_model
        from spa_dist.parallel.groups import Launch, start_process_groups
        from spa_dist.tasks import LanguageModelling
        from spa_dist.training.callbacks import MaskTraining, MetricsLog
        from spa_dist.training.engine import Engine
        from spa_dist.training.hardware import choose_device
        from spa_dist.training.signals import StopRequest
        from spa_dist.training.state import TrainState
        from spa_dist.training.trainer import Trainer

        launch = Launch.from_environment()
        config = with_vocabulary(load_config(name, overrides), 8192)
        self.every = config.attention.mask.every if config.attention.mask else None
        if self.every:
            config = load_config(name, [*overrides, f"attention.mask.every={EVERY}"])
            config = with_vocabulary(config, 8192)
        device = choose_device(config, launch.local_rank)
        plan = plan_batches(config, launch.world_size)
        if not torch.distributed.is_initialized():
            type(self).grid = start_process_groups(launch, device, 1, 5.0)
        engine = Engine(config, plan, build_model(config, self.grid), self.grid)
        random = np.random.default_rng(0)
        shape = (plan.micro_size, config.model.sequence_length)
        stream = iter(lambda: (random.integers(8192, size=shape), random.integers(8192, size=shape)), None)
        log = MetricsLog(folder / "metrics.jsonl")
        self.masks = MaskTraining(config, log, None)
        self.trainer = Trainer(
            config, plan, self.grid, engine, LanguageModelling(), stream, 1, TrainState(), [], StopRequest()
        )
        folder.mkdir(parents=True)
        self.masks.on_start(self.trainer)
        self.steps: list[float] = []
        self.updates: list[float] = []

    def advance(self) -> None:
        """EVERY steps and the callback after each; the last one's is an update where there is a mask."""
        times = []
        for _ in range(EVERY):
            report = self.trainer._step()
            assert report is not None
            times.append(report.seconds)
            began = time.perf_counter()
            self.masks.on_step(self.trainer, report)
            if self.every and report.step % EVERY == 0:
                self.updates.append(time.perf_counter() - began)
        self.steps.append(statistics.median(times))

    def result(self) -> dict[str, Any]:
        """Medians without the first round, and what they are made of."""
        step = statistics.median(self.steps[1:])
        update = statistics.median(self.updates[1:]) if self.updates else None
        share = update / (step * self.every) if update is not None and self.every else None
        return {
            "step_seconds": step, "update_seconds": update, "every": self.every, "share": share,
            "steps": self.steps[1:], "updates": self.updates[1:],
        }  # fmt: skip


if __name__ == "__main__":
    run_command(main)
