"""What the training loop costs over a bare PyTorch loop: the same model and data, steps taken in turns in one process.

    python tools/bench_training_loop.py --config spa_tiny --data data/python --output docs/results/training_loop.json

The bare loop is forward, backward, clipping and AdamW of torch. The trainer adds DeepSpeed, the loss normalised over ranks, the
stream with its thread, and the metrics log at every step. Reported: the median over rounds of the ratio of times, its
quartiles, and the raw times. One process; the machine may be shared, so ratios of neighbouring rounds are what counts.
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


def main() -> int:
    """Time rounds of both loops for each ZeRO stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="spa_tiny")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of each loop in a round")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--output", metavar="FILE.json")
    args = parser.parse_args()
    share_cores()
    results = [measure(args, stage) for stage in args.stages]
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "config": args.config, "results": results}
    print(f"{'ZeRO':>4} {'ratio':>7} {'quartiles':>15} {'bare s/step':>12} {'trainer s/step':>15}")
    for row in results:
        low, high = row["quartiles"]
        print(
            f"{row['stage']:>4} {row['ratio']:>7.3f} {low:>7.3f} {high:>7.3f} {row['bare']:>12.3f} {row['trainer']:>15.3f}"
        )
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Ratios of trainer time to bare time over neighbouring rounds."""
    with tempfile.TemporaryDirectory() as folder:
        bare, trainer, close = loops(args, stage, Path(folder))
        for _ in range(2):
            bare(), trainer()
        rounds = []
        for number in range(args.rounds):
            order = (bare, trainer) if number % 2 else (trainer, bare)
            times = {}
            for loop in order:
                began = time.perf_counter()
                for _ in range(args.steps):
                    loop()
                times[loop] = (time.perf_counter() - began) / args.steps
            rounds.append((times[bare], times[trainer]))
        close()
    ratios = [trained / plain for plain, trained in rounds]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "stage": stage,
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "bare": statistics.median(plain for plain, _ in rounds),
        "trainer": statistics.median(trained for _, trained in rounds),
        "rounds": rounds,
    }


def loops(args: argparse.Namespace, stage: int, folder: Path) -> tuple[Any, Any, Any]:
    """One step of the bare loop, one of the trainer's with its log, and what closes them."""
    import torch

    from data_pipeline.dataset import open_dataset
    from data_pipeline.stream import TrainStream
    from spa_dist.config import load_config
    from spa_dist.model import build_model
    from spa_dist.parallel.groups import Launch, start_process_groups
    from spa_dist.tasks import LanguageModelling
    from spa_dist.training.callbacks import MetricsLog
    from spa_dist.training.engine import Engine
    from spa_dist.training.hardware import choose_device
    from spa_dist.training.optimizer import build_optimizer
    from spa_dist.training.run import prepare_run
    from spa_dist.training.signals import StopRequest
    from spa_dist.training.state import TrainState
    from spa_dist.training.trainer import Trainer

    overrides = [f"data.path={args.data}", f"deepspeed.zero_optimization.stage={stage}", "logging.every=1", *args.set]
    launch = Launch.from_environment()
    config, plan, _ = prepare_run(load_config(args.config, overrides), launch)
    device = choose_device(config, 0)
    grid = start_process_groups(launch, device, 1, 10.0)
    task = LanguageModelling()

    def stream() -> Any:
        own = TrainStream(open_dataset(args.data), sequence_length=config.model.sequence_length, seed=1, workers=1)
        return own.micro_batches(0, global_size=plan.global_size, micro_size=plan.micro_size), own.epoch_samples

    plain = build_model(config, grid).to(device)
    optimizer = build_optimizer(plain, config)
    plain_stream, _ = stream()

    def bare() -> None:
        for _ in range(plan.accumulation_steps):
            inputs, targets = (torch.from_numpy(part).to(device) for part in next(plain_stream))
            (task.loss(plain, inputs, targets) / plan.tokens_per_step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(config, plan, build_model(config, grid), grid)
    trained_stream, samples = stream()
    log = MetricsLog(folder / "metrics.jsonl")
    trainer = Trainer(config, plan, grid, engine, task, trained_stream, samples, TrainState(), [log], StopRequest())

    def trained() -> None:
        report = trainer._step()
        assert report is not None
        log.on_step(trainer, report)

    def close() -> None:
        plain_stream.close()
        trained_stream.close()

    return bare, trained, close


if __name__ == "__main__":
    run_command(main)
