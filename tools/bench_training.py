"""Tokens per second of the whole model, SPA against dense attention on torch's SDPA, at several lengths, steps taken in turns.

    python tools/bench_training.py --output docs/results/bench_training.json

A step is forward, backward and AdamW on random tokens, in one process, without the trainer around it. Both models have the same
layers, widths and data; `dense` is attention.kind=dense with attention.backend=sdpa, `spa` is attention.kind=spa with auto. The
ratio is the median over rounds of dense time / SPA time of neighbouring steps. Shown apart: the product that makes queries, keys
and values, with S folded into its weights (folding included) against the dense one, forward and backward.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spa_dist.cli import run_command, share_cores

MODEL = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "head_dim": 64, "value_dim": 64, "vocab_size": 4096}
SIDES = {
    "dense": {"kind": "dense", "backend": "sdpa"},
    "spa": {"kind": "spa", "backend": "auto", "d_proj": 32},
}
Step = Callable[[], object]


def main() -> int:
    """Measure each length and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--tokens", type=int, default=4096, help="of one step; the batch is tokens / length")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="for both models")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time: with OMP_NUM_THREADS=1, beside other work")
    parser.add_argument("--machine", default=f"{platform.machine()}, {os.cpu_count()} cores", help="how the report names it")
    parser.add_argument("--output", metavar="FILE.json")
    args = parser.parse_args()
    share_cores()
    import torch

    rows = [measure(args, length, dtype) for dtype in args.dtypes for length in args.lengths]
    print(
        f"{'dtype':>9} {'N':>6} {'batch':>6} {'dense tok/s':>12} {'SPA tok/s':>12} {'ratio':>6} {'quartiles':>13} {'QKV ratio':>10}"
    )
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"{row['dtype']:>9} {row['length']:>6} {row['batch']:>6} {row['dense']:>12,.0f} {row['spa']:>12,.0f} "
            f"{row['ratio']:>6.3f} {low:>6.3f} {high:>6.3f} {row['qkv_ratio']:>10.3f}"
        )
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else args.machine
    report = {
        "machine": machine,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": MODEL,
        "rows": rows,
    }
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace, length: int, dtype: str) -> dict[str, Any]:
    """Tokens per second of both models at one length, and the ratio of the QKV products' times."""
    batch = max(1, args.tokens // length)
    clock = time.process_time if args.cpu_time else time.perf_counter
    steps = {side: training_step(args, side, length, batch, dtype) for side in SIDES}
    times = in_turns(steps, args.rounds, clock)
    products = in_turns({side: qkv_step(side, batch * length, dtype) for side in SIDES}, 3 * args.rounds, clock)
    ratios = [a / b for a, b in zip(times["dense"], times["spa"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "length": length, "batch": batch, "dtype": dtype,
        "dense": batch * length / statistics.median(times["dense"]), "spa": batch * length / statistics.median(times["spa"]),
        "ratio": statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]],
        "qkv_ratio": statistics.median(a / b for a, b in zip(products["dense"], products["spa"], strict=True)),
        "qkv_limit": 3 * MODEL["head_dim"] / (2 * SIDES["spa"]["d_proj"] + MODEL["value_dim"]),
        "seconds": times, "qkv_seconds": products,
    }  # fmt: skip


def in_turns(steps: dict[str, Step], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each step in each round, the order turning, after two rounds that do not count."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name in sorted(steps, reverse=number % 2 == 1):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = clock()
            steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 2:
                times[name].append(clock() - began)
    return times


def training_step(args: argparse.Namespace, side: str, length: int, batch: int, dtype: str) -> Step:
    """Forward, backward and AdamW of the project's own model."""
    import torch

    from spa_dist.config import load_config
    from spa_dist.model import build_model
    from spa_dist.parallel.groups import Launch, start_process_groups
    from spa_dist.tasks import LanguageModelling

    options = [f"model.{key}={value}" for key, value in (MODEL | {"sequence_length": length}).items()]
    options += [f"attention.{key}={value}" for key, value in SIDES[side].items()]
    config = load_config("spa_tiny", [*options, *args.set])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    global _grid
    if _grid is None:
        _grid = start_process_groups(Launch.from_environment(), device, 1, 10.0)
    model = build_model(config, _grid).to(device, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, MODEL["vocab_size"], (batch, length + 1), device=device)

    def step() -> None:
        loss = LanguageModelling.loss(model, tokens[:, :-1], tokens[:, 1:])
        (loss / (batch * length)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


_grid: Any = None


def qkv_step(side: str, tokens: int, dtype: str) -> Step:
    """The product that makes queries, keys and values, forward and backward; SPA folds S into the weights first."""
    import torch

    from spa_dist.attention import fold_projection, make_projection

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind: Any = getattr(torch, dtype)
    hidden, heads, d_k, d_v = (MODEL[key] for key in ("hidden_size", "num_heads", "head_dim", "value_dim"))
    x = torch.randn(tokens, hidden, device=device, dtype=kind, requires_grad=True)
    query, key = (torch.randn(heads * d_k, hidden, device=device, dtype=kind, requires_grad=True) for _ in range(2))
    value = torch.randn(heads * d_v, hidden, device=device, dtype=kind, requires_grad=True)
    projection = make_projection("random", d_k, SIDES["spa"]["d_proj"]).to(device, kind)

    def step() -> None:
        q, k = (query, key) if side == "dense" else (fold_projection(query, projection), fold_projection(key, projection))
        product = x @ torch.cat([q, k, value]).T
        torch.autograd.grad(product, (x, query, key, value), torch.ones_like(product))

    return step


if __name__ == "__main__":
    run_command(main)
