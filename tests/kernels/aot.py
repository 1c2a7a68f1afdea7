"""Compile the Triton kernels with no GPU at hand and read what the assembler says about registers and shared memory.

`python -m tests.kernels.aot --output docs/results/kernels_aot.json` compiles every configuration that the package ships, for every
architecture, but those that the file has (remove it after a change of the kernels); the test compiles each row of the tables of
block sizes once, and the elementwise kernels, which have one.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = ("bf16", "fp16", "fp32")
KERNELS = ("forward", "dkdv", "dq", "delta")
FLOAT_POINTERS = {"Lse", "Delta", "Out"}
DATA_POINTERS = {"Q", "K", "V", "D_out", "D_q", "D_k", "D_v"}
ELEMENTWISE_FLOATS = {"Sums", "Top", "Sum", "Picked", "Lse", "D_loss"}
ELEMENTWISE = {
    "triton_pointwise": (
        "bias_gelu_forward",
        "bias_gelu_backward",
        "bias_dropout_residual_forward",
        "bias_dropout_residual_backward",
    ),
    "triton_cross_entropy": ("statistics_kernel", "gradient_kernel"),
}
TASK = ("kernel", "d_qk", "d_v", "dtype", "architecture", "dropout")
FLOATS = {"scale", "scale_log2", "keep_scale"}


def compile_one(task):
    """(kernel, d_qk, d_v, dtype, architecture, dropout) → a dict with registers, stack (spills live there) and shared bytes."""
    import torch

    from spa_dist.kernels import triton_backward, triton_forward
    from spa_dist.kernels.triton_attention import precision
    from spa_dist.kernels.triton_config import QK_PARTS

    kernel, d_qk, d_v, dtype, architecture, dropout = task
    function = getattr(triton_forward if kernel == "forward" else triton_backward, f"{kernel}_kernel")
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    c = blocks(kernel, d_qk, d_v, dtype)
    constants = {"D0": QK_PARTS[d_qk][0], "D1": QK_PARTS[d_qk][1], "DV": c.d_v, "PARTS": c.parts, "DROPOUT": dropout}
    constants |= {"PRECISION": precision(torch_dtype), "BLOCK_M": c.block_m, "BLOCK_N": c.block_n}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: argument_type(name, dtype, constants) for name in function.arg_names}
    usage = compile_for(function, signature, constants, architecture, num_warps=c.warps, num_stages=c.stages)
    return {
        "kernel": kernel, "d_qk": d_qk, "d_v": d_v, "dtype": dtype, "architecture": architecture, "dropout": dropout,
        "blocks": list(c), **usage,
    }  # fmt: skip


def compile_elementwise(task):
    """(module, kernel, dtype, architecture) → as `compile_one`."""
    module, kernel, dtype, architecture = task
    home = importlib.import_module(f"spa_dist.kernels.{module}")
    function = getattr(home, kernel)
    sizes = {name: getattr(home, name) for name in ("ROWS", "COLUMNS", "BLOCK") if name in function.arg_names}
    constants = sizes | {name: True for name in ("BIAS", "DROPOUT") if name in function.arg_names}
    signature = {name: elementwise_type(name, dtype, constants) for name in function.arg_names}
    warps = 8 if kernel == "statistics_kernel" else 4  # as triton_cross_entropy launches it
    usage = compile_for(function, signature, constants, architecture, num_warps=warps)
    return {"kernel": kernel, "dtype": dtype, "architecture": architecture, **usage}


def compile_for(function, signature, constants, architecture, **options):
    """Registers, stack and shared memory of a kernel whose pointers and strides are multiples of 16, as they are in use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name.startswith("stride") or name == "width"
    }
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    registers, stack, local = resource_usage(compiled.asm["cubin"], Path(triton.__file__).parent)
    return {"registers": registers, "stack": stack + local, "shared": compiled.metadata.shared}


def blocks(kernel, d_qk, d_v, dtype):
    """The block sizes, warps and stages that a kernel is launched with."""
    from spa_dist.kernels.triton_config import config

    c = config("dkdv" if kernel == "delta" else kernel, d_qk, d_v, 4 if dtype == "fp32" else 2)
    return c._replace(block_m=32, warps=4, stages=3) if kernel == "delta" else c  # as triton_attention launches it


def argument_type(name, dtype, constants):
    if name in constants:
        return "constexpr"
    if name in FLOAT_POINTERS:
        return "*fp32"
    if name in DATA_POINTERS:
        return f"*{dtype}"
    if name == "Lengths":
        return "*i32"
    return "fp32" if name in FLOATS else "i32"


def elementwise_type(name, dtype, constants):
    if name in constants:
        return "constexpr"
    if name == "Targets":
        return "*i64"
    if name[0].isupper():
        return "*fp32" if name in ELEMENTWISE_FLOATS else f"*{dtype}"
    return "fp32" if name in FLOATS else "i32"


def resource_usage(cubin, triton_folder):
    """(registers per thread, stack bytes, local bytes) from cuobjdump; a spilled register has a place on the stack."""
    tool = triton_folder / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    assert found is not None, report
    return tuple(int(x) for x in found.groups())


def faults(rows):
    """The rows that spill or do not fit, as text."""
    return [str(r) for r in rows if r["stack"] > 0 or r["shared"] > SHARED_LIMIT[r["architecture"]]]


def covering():
    """Each row of the tables of block sizes once, at the widest values it serves, with dropout; the architectures in turn."""
    from spa_dist.kernels.triton_config import config

    last = {}
    for kernel, (d_qk, d_v), dtype, _, _ in everything():
        if kernel != "delta" and dtype != "fp16":
            last[kernel, dtype, config(kernel, d_qk, d_v, 4 if dtype == "fp32" else 2)._replace(parts=0)] = (
                kernel,
                (d_qk, d_v),
                dtype,
            )
    architectures = itertools.cycle(SHARED_LIMIT)
    return [(*task, next(architectures), True) for task in last.values()]


def elementwise():
    """Every elementwise kernel in every dtype, each for every architecture."""
    names = [(module, kernel) for module, kernels in ELEMENTWISE.items() for kernel in kernels]
    return [(*name, dtype, architecture) for name, dtype, architecture in itertools.product(names, DTYPES, SHARED_LIMIT)]


def everything():
    from spa_dist.kernels.triton_config import QK_PARTS, V_WIDTHS

    widths = list(itertools.product(QK_PARTS, V_WIDTHS))
    tasks = itertools.product(KERNELS, widths, DTYPES, SHARED_LIMIT, (False, True))
    return [task for task in tasks if task[0] != "delta" or not task[-1]]  # which knows no dropout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--covering", action="store_true", help="print what the test compiles")
    where.add_argument("--output", type=Path, metavar="FILE", help="everything, as JSON; goes on where it stopped")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.covering:
        tasks = [(kernel, *widths, *rest) for kernel, widths, *rest in covering()]
        with ProcessPoolExecutor(options.processes) as pool:
            print(json.dumps([*pool.map(compile_one, tasks), *pool.map(compile_elementwise, elementwise())]))
        return
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    known = {tuple(row[key] for key in TASK) for row in rows}
    tasks = [(kernel, *widths, *rest) for kernel, widths, *rest in everything()]
    waiting = [task for task in tasks if task not in known]
    with ProcessPoolExecutor(options.processes) as pool:
        for done, row in enumerate(pool.map(compile_one, waiting, chunksize=2), 1):
            rows.append(row)
            if done % 20 == 0 or done == len(waiting):
                write(options.output, rows, len(tasks))
                print(f"{len(rows)} of {len(tasks)} compiled, {len(faults(rows))} faults", flush=True)
    sys.exit(1 if faults(rows) else 0)


def write(path, rows, count):
    """The report, under a temporary name first."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"compiled": len(rows), "of": count, "faults": faults(rows)})
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    main()
