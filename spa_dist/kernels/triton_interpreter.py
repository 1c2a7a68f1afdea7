"""Two repairs of bfloat16 in Triton's interpreter, in force only where TRITON_INTERPRET=1.

The interpreter keeps bfloat16 as its bit pattern in uint16. Its dot product multiplies the patterns, and its conversion from
float32 cuts the low bits off where a GPU rounds to nearest even (both seen in Triton 3.9).
"""

import os
from typing import Any

import numpy as np
import triton.language as tl


def repair_bfloat16() -> None:
    """Make the interpreter multiply and round bfloat16 as a GPU does; does nothing where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "bfloat16_repaired", False):
        return
    handle: Any = interpreter.TensorHandle
    plain_dot, plain_truncate = builder.create_dot, builder.create_fp_trunc

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (handle(_widened(x.data), tl.float32) if _is_pattern(x) else x for x in (a, b))
        return plain_dot(self, a, b, *rest)

    def create_fp_trunc(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(_rounded(source.data), tl.bfloat16)
        return plain_truncate(self, source, target)

    builder.create_dot, builder.create_fp_trunc = create_dot, create_fp_trunc
    builder.bfloat16_repaired = True


def _is_pattern(operand: Any) -> bool:
    return bool(operand.dtype.scalar == tl.bfloat16 and operand.data.dtype == np.uint16)


def _widened(pattern: np.ndarray) -> np.ndarray:
    return (pattern.astype(np.uint32) << 16).view(np.float32)


def _rounded(value: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(value).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), np.uint32(0x7FC0), rounded).astype(np.uint16)
