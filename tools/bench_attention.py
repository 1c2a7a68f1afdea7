"""SPA against dense attention, each with the fastest backend that can serve it, timed in turns in one process.

    python tools/bench_attention.py --output docs/results/kernels.json --plot docs/results/kernels.png

A round times every candidate once, in an order that turns from round to round; a side's backend is the one with the lowest
median, and the ratio is the median over rounds of dense time / SPA time; `auto` is that ratio for what the dispatcher picks. The
limit is that of the arithmetic: forward (d_k + d_v) / (d_k' + d_v), forward and backward (4 d_k + 3 d_v) / (4 d_k' + 3 d_v),
scores d_k / d_k'. CPU, or CUDA where there is one.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from spa_dist.cli import run_command
from spa_dist.errors import ConfigError
from spa_dist.kernels import attention

SHAPES = (
    "1,1,2048,512,64,512",
    "1,1,4096,512,64,512",
    "1,4,2048,128,32,128",
    "1,2,4096,128,32,128",
    "8,4,512,64,32,64",
    "32,4,128,64,32,64",
    "8,4,128,32,16,32",
)
WORKS = ("scores", "forward", "forward+backward", "decode")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[], object]
Clock = Callable[[], float]


def main() -> int:
    """Measure each shape in each dtype and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,H,N,d_k,d_proj,d_v")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--flex", action="store_true", help="let FlexAttention take part on CPU (compiles for each shape)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time: for one thread, on a machine that others use"
    )
    parser.add_argument("--machine", default=f"{platform.machine()}, {os.cpu_count()} cores", help="how the report names it")
    parser.add_argument("--output", metavar="FILE.json")
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.cpu_time and (device.type == "cuda" or torch.get_num_threads() > 1):
        raise ConfigError("--cpu-time counts one CPU thread: set OMP_NUM_THREADS=1 and CUDA_VISIBLE_DEVICES=''")
    clock = time.process_time if args.cpu_time else time.perf_counter
    name = torch.cuda.get_device_name() if device.type == "cuda" else args.machine
    report = {"machine": name, "torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock.__name__}
    rows: list[dict[str, Any]] = []
    for text in args.shapes:
        for dtype in args.dtypes:
            for row in measure(parse_shape(text), dtype, args.works, device, args.rounds, args.flex, clock):
                print(table_line(row), flush=True)
                rows.append(row)
            if args.output:  # after each shape, so that a run that is stopped leaves what it measured
                Path(args.output).write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(report | {"rows": rows}, Path(args.plot))
    return 0


def parse_shape(text: str) -> tuple[int, ...]:
    """Six positive integers B,H,N,d_k,d_proj,d_v."""
    parts = text.split(",")
    if len(parts) != 6 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"--shapes: {text!r} is not B,H,N,d_k,d_proj,d_v, six positive integers such as {SHAPES[0]}")
    return tuple(int(p) for p in parts)


def measure(
    shape: tuple[int, ...],
    dtype: str,
    works: Sequence[str],
    device: torch.device,
    rounds: int,
    flex: bool,
    clock: Clock,
) -> Iterator[dict[str, Any]]:
    """One row per kind of work: times of both sides, their ratio, its limit, and the share of the limit that is reached."""
    d_k, d_proj, d_v = shape[3:]
    sides = {"dense": tensors(shape, d_k, DTYPES[dtype], device), "spa": tensors(shape, d_proj, DTYPES[dtype], device)}
    limits = {
        "scores": d_k / d_proj,
        "forward": (d_k + d_v) / (d_proj + d_v),
        "forward+backward": (4 * d_k + 3 * d_v) / (4 * d_proj + 3 * d_v),
        "decode": (d_k + d_v) / (d_proj + d_v),
    }
    for work in works:
        limit = limits[work]
        candidates = {
            (side, backend): run
            for side, (q, k, v, d_out) in sides.items()
            for backend, run in runs(work, q, k, v, d_out, flex).items()
        }
        times = timed(candidates, rounds, device, clock)
        named = {k: statistics.median(t) for k, t in times.items() if k[1] != "auto"}
        best = {side: min((k for k in named if k[0] == side), key=lambda k: named[k]) for side in sides}
        ratios = [a / b for a, b in zip(times[best["dense"]], times[best["spa"]], strict=True)]
        auto = times.get(("spa", "auto"), times[best["spa"]])
        ratio = statistics.median(ratios)
        yield {
            "shape": list(shape), "dtype": dtype, "work": work,
            "dense_backend": best["dense"][1], "spa_backend": best["spa"][1],
            "dense_ms": 1e3 * statistics.median(times[best["dense"]]), "spa_ms": 1e3 * statistics.median(times[best["spa"]]),
            "ratio": ratio, "quartiles": quartiles(ratios), "limit": limit, "share": ratio / limit,
            "auto_ratio": statistics.median(a / b for a, b in zip(times[best["dense"]], auto, strict=True)),
            "dense_peak_mib": peak_mib(candidates[best["dense"]], device),
            "spa_peak_mib": peak_mib(candidates[best["spa"]], device),
            "all_ms": {f"{side} {backend}": 1e3 * statistics.median(t) for (side, backend), t in times.items()},
        }  # fmt: skip


def tensors(shape: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v (leaves that want gradients) and the gradient of the output."""
    batch, heads, length, _, _, d_v = shape
    q, k = (torch.randn(batch, heads, length, width, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    v = torch.randn(batch, heads, length, d_v, dtype=dtype, device=device, requires_grad=True)
    return q, k, v, torch.randn(batch, heads, length, d_v, dtype=dtype, device=device)


def runs(work: str, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, flex: bool) -> dict[str, Run]:
    """Every backend that can do this work on these tensors."""
    if work == "scores":
        rows, keys = q.detach()[:, :, :256], k.detach().mT
        return {"matmul": lambda: rows @ keys}
    if work == "decode":
        q = q.detach()[:, :, -1:]
    found: dict[str, Run] = {}
    for backend in ("sdpa", "cudnn", "triton", "flex", "tiled", "auto"):
        if backend == "flex" and q.device.type == "cpu" and not flex:
            continue
        run = one_run(work, backend, q, k, v, d_out)
        try:
            run()
        except ValueError:  # the backend cannot serve this problem, and says so
            continue
        found[backend] = run
    return found


def one_run(work: str, backend: str, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Run:
    """A function of no arguments that does the work once, causal."""
    scale = q.shape[-1] ** -0.5

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, scale=scale, causal=True, backend=backend)

    def both() -> object:
        out = attention(q, k, v, scale=scale, causal=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), d_out)

    return both if work == "forward+backward" else forward


def timed(candidates: dict[Any, Run], rounds: int, device: torch.device, clock: Clock) -> dict[Any, list[float]]:
    """Seconds of each candidate in each round, after two rounds that do not count."""
    times: dict[Any, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = stopwatch(candidates[name], device, clock)
            if number >= 2:
                times[name].append(seconds)
    return times


def stopwatch(run: Run, device: torch.device, clock: Clock) -> float:
    """Seconds per call, over enough calls to last a few milliseconds."""
    calls, seconds = 1, 0.0
    while True:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = clock()
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - began
        if seconds > 2e-3 or calls >= 64:
            return seconds / calls
        calls *= 4


def peak_mib(run: Run, device: torch.device) -> float:
    """Peak of the memory that one call holds above what was there before, in MiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    live = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 2**20


def quartiles(values: list[float]) -> list[float]:
    """Lower and upper quartile."""
    return [statistics.quantiles(values, n=4)[i] for i in (0, 2)] if len(values) > 1 else values * 2


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""
    shape = ",".join(map(str, row["shape"]))
    return (
        f"{row['dtype']} {shape:<22} {row['work']:<16} dense {row['dense_ms']:8.2f} ms ({row['dense_backend']:<6}) "
        f"SPA {row['spa_ms']:8.2f} ms ({row['spa_backend']:<6}) ratio {row['ratio']:5.2f} limit {row['limit']:5.2f} "
        f"share {row['share']:5.2f} auto {row['auto_ratio']:5.2f} peak {row['dense_peak_mib']:7.1f} / {row['spa_peak_mib']:7.1f} MiB"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of the ratio with the limit marked, forward and forward+backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = ("forward", "forward+backward")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, work in zip(axes, works, strict=True):
        rows = [r for r in report["rows"] if r["work"] == work]
        axis.bar(range(len(rows)), [r["ratio"] for r in rows], color=["C0" if r["dtype"] == "fp32" else "C1" for r in rows])
        axis.scatter(
            range(len(rows)), [r["limit"] for r in rows], marker="_", s=300, color="black", label="arithmetic limit"
        )
        axis.axhline(1.0, color="grey", linewidth=0.8)
        labels = [f"{r['dtype']}\nN={r['shape'][2]}\n{r['shape'][3]}→{r['shape'][4]}\nd_v {r['shape'][5]}" for r in rows]
        axis.set_xticks(range(len(rows)), labels, fontsize=6)
        axis.set_title(f"{work}: time of dense / time of SPA")
        axis.legend()
    figure.suptitle(report["machine"])
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    run_command(main)
