"""Kernel tests, benchmarks and two short training runs on a GPU, in under eight minutes, as one JSON.

    python tools/gpu_suite.py --output gpu_suite.json

Needs torch, and Triton for its kernels; the tests need pytest and hypothesis too, and without them the kernels are compared with
float64 at fixed shapes instead. What a machine lacks is left out, and the JSON and the last lines say so. Without a GPU the same
steps run on the CPU, small: a check of the script. Exit code 1 when a step fails.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_training import in_turns  # noqa: E402

from spa_dist import kernels  # noqa: E402
from spa_dist.attention import SparseProjectionAttention  # noqa: E402

BUDGET_SECONDS = 460.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BENCHMARK = {
    True: ("4,16,4096,128,32,128", "4,16,4096,64,32,64", "1,16,16384,128,32,128", "8,16,1024,128,32,128"),
    False: ("1,2,256,128,32,128",),
}[GPU]
TARGETS = {(128, 32, 128): 1.4, (64, 32, 64): 1.1}


def main() -> int:
    """Run the steps that fit the time and what is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE.json", required=True)
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE", help="go on as if it were not installed")
    args = parser.parse_args()
    began = time.monotonic()
    report: dict[str, Any] = {"machine": torch.cuda.get_device_name() if GPU else "cpu", "torch": torch.__version__}
    left_out: list[str] = []
    failed: list[str] = []

    def installed(package: str, what: str) -> bool:
        there = package not in args.without and importlib.util.find_spec(package) is not None
        if not there:
            left_out.append(f"{what}: {package} is not installed")
        return there

    steps: dict[str, Callable[[], Any]] = {"exactness": exactness}
    tests = [installed(package, "tests/kernels") for package in ("pytest", "hypothesis")]
    triton = installed("triton", "the Triton kernels")
    if all(tests):
        steps["tests"] = lambda: kernel_tests(180.0)
    steps["elementwise"] = elementwise
    steps["benchmark"] = lambda: benchmark(Path(args.output).with_suffix(".benchmark.json"), 170.0)
    steps |= {f"training_{dtype}": lambda dtype=dtype: training(getattr(torch, dtype)) for dtype in ("bfloat16", "float16")}
    if not GPU:
        left_out.append("targets and Triton's speed: there is no GPU")
    for name, step in steps.items():
        if time.monotonic() - began > BUDGET_SECONDS:
            left_out.append(f"{name}: the time was up")
            continue
        started = time.monotonic()
        try:
            report[name] = step()
        except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
            report[name] = {"error": str(error)[-4000:]}
            failed.append(name)
        print(f"{name}: {time.monotonic() - started:.0f} s{' FAILED' if name in failed else ''}", flush=True)
    report |= {"triton": triton, "left_out": left_out, "failed": failed, "seconds": time.monotonic() - began}
    Path(args.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(*(f"left out: {line}" for line in left_out), f"{args.output}: {report['seconds']:.0f} s", sep="\n")
    return 1 if failed else 0


def exactness() -> list[dict[str, Any]]:
    """Errors against float64, output and gradients, of what `auto` picks and of torch's own attention in the same dtype."""
    rows = []
    for d_qk, d_v in ((32, 64), (32, 128), (48, 256), (64, 512)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            q, k = (torch.randn(1, 2, 300, d_qk, device=DEVICE, dtype=dtype) for _ in range(2))
            v, d_out = (torch.randn(1, 2, 300, d_v, device=DEVICE, dtype=dtype) for _ in range(2))
            scale = d_qk**-0.5
            exact = gradients(lambda *x, s=scale: written_out(*x, s), *(x.double() for x in (q, k, v, d_out)))
            mine = gradients(lambda *x, s=scale: kernels.attention(*x, scale=s, causal=True), q, k, v, d_out)
            theirs = gradients(
                lambda *x, s=scale: F.scaled_dot_product_attention(*x, scale=s, is_causal=True), q, k, v, d_out
            )
            ratios = [error(a, e) / max(error(b, e), 1e-9) for a, b, e in zip(mine, theirs, exact, strict=True)]
            rows.append({"d_qk": d_qk, "d_v": d_v, "dtype": str(dtype), "error_over_torchs": ratios})
            assert max(ratios) <= 2.0, f"d_qk {d_qk}, d_v {d_v}, {dtype}: {ratios} times torch's error"
    return rows


def gradients(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def written_out(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The definition."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k.mT * scale).masked_fill(hidden, -torch.inf), -1) @ v


def error(x: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((x.double() - exact).norm() / exact.norm())


def kernel_tests(seconds: float) -> dict[str, Any]:
    """tests/kernels, which use the GPU where there is one; without one a few of them."""
    chosen = ["tests/kernels", "--ignore", "tests/kernels/test_compile.py"] if GPU else ["tests/kernels/test_edges.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout
    return {"summary": done.stdout.splitlines()[-1]}


def benchmark(output: Path, seconds: float) -> dict[str, Any]:
    """tools/bench_attention.py at a GPU's shapes, and whether forward + backward reaches its target."""
    command = [sys.executable, "tools/bench_attention.py", "--shapes", *BENCHMARK, "--dtypes", "bf16", "--rounds", "5"]
    command += ["--output", str(output.resolve())]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    output.unlink()
    both = [row for row in rows if row["work"] == "forward+backward"] if GPU else []
    targets = [
        {"shape": row["shape"], "ratio": row["ratio"], "target": TARGETS[tuple(row["shape"][3:])]}
        for row in both
        if tuple(row["shape"][3:]) in TARGETS
    ]
    return {"rows": rows, "targets": targets}


def elementwise(rounds: int = 9) -> list[dict[str, Any]]:
    """Milliseconds of forward + backward in bf16, the fused functions and torch's own in turns: medians, and that of the ratios."""
    rows, width, classes = (16384, 4096, 50304) if GPU else (64, 64, 256)
    x, residual, logits = (torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16) for n in (width, width, classes))
    bias = torch.randn(width, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(0, classes, (rows,), device=DEVICE)
    pairs: dict[str, tuple[list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
        "bias_gelu": ([x, bias], lambda x, b: kernels.bias_gelu(x * 1, b), lambda x, b: F.gelu(x * 1 + b)),
        "bias_dropout_residual": (
            [x, bias, residual],
            lambda x, b, r: kernels.bias_dropout_residual(x * 1, b, r, dropout=0.1, seed=1),
            lambda x, b, r: r + F.dropout(x * 1 + b, 0.1),
        ),
        "cross_entropy": (
            [logits],
            lambda x: kernels.cross_entropy(x * 1, targets),
            lambda x: F.cross_entropy(x * 1, targets, reduction="sum"),
        ),
    }
    report = []
    for name, (inputs, fused, plain) in pairs.items():
        steps = {side: both_passes(function, inputs) for side, function in (("fused", fused), ("torch", plain))}
        times = in_turns(steps, rounds, time.perf_counter)
        ratios = [theirs / mine for mine, theirs in zip(times["fused"], times["torch"], strict=True)]
        fused_ms, torch_ms = (1e3 * statistics.median(times[side]) for side in steps)
        report.append({"function": name, "fused_ms": fused_ms, "torch_ms": torch_ms, "ratio": statistics.median(ratios)})
    return report


def both_passes(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    """One forward and backward; the product by 1 that gives the function a tensor to write over is in it on both sides."""

    def run() -> None:
        out = function(*(x.detach().requires_grad_() for x in inputs))
        out.backward(torch.ones_like(out))

    return run


class Model(nn.Module):
    """A small decoder on the attention module and the fused functions."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(
            SparseProjectionAttention(width, width // 64, 32, rope=True, seed=i) for i in range(layers)
        )
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss."""
        x = self.embedding(tokens)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x), causal=True)
            hidden = F.linear(self.norms[2 * i + 1](x), self.up[i].weight)
            hidden = self.down[i](kernels.bias_gelu(hidden, self.up[i].bias.to(hidden.dtype)))
            x = kernels.bias_dropout_residual(hidden.to(x.dtype), None, x, dropout=0.1, seed=i)
        logits = F.linear(self.norms[-1](x), self.embedding.weight)
        return kernels.cross_entropy(logits.flatten(0, 1), targets.flatten()) / targets.numel()


def training(dtype: torch.dtype) -> dict[str, Any]:
    """Steps of autocast training on sequences that count upwards; the loss must fall to a tenth, and stay finite."""
    torch.manual_seed(0)
    width, layers, batch, length, steps = (512, 6, 16, 1024, 150) if GPU else (128, 2, 4, 32, 40)
    model = Model(width, layers, 128).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16, init_scale=2.0**12)
    losses = []
    started = time.monotonic()
    for _ in range(steps):
        start = torch.randint(0, 128, (batch, 1), device=DEVICE)
        tokens = (start + torch.arange(length + 1, device=DEVICE)) % 128
        with torch.autocast(DEVICE, dtype=dtype):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
    seconds = time.monotonic() - started
    assert losses[-1] < 0.1 * losses[0], f"{dtype}: loss {losses[0]} → {losses[-1]}"
    return {"first": losses[0], "last": losses[-1], "tokens_per_second": steps * batch * length / seconds}


if __name__ == "__main__":
    sys.exit(main())
