"""The Triton backend as the dispatcher sees it: Triton itself is imported on first use, where it is installed."""

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem
from spa_dist.kernels.triton_config import QK_PARTS, V_WIDTHS


def triton_refusal(p: Problem) -> str | None:
    """Why the Triton kernels cannot serve, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if p.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton's kernels need a CUDA device (or TRITON_INTERPRET=1), and the tensors are on {p.device.type}"
    if p.dtype == torch.float64:
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if p.d_qk not in QK_PARTS or p.d_v not in V_WIDTHS:
        return (
            f"the Triton kernels are built for d_qk in {sorted(QK_PARTS)} and d_v in {list(V_WIDTHS)}, not {p.d_qk}, {p.d_v}"
        )
    return None


def serves_elementwise(*tensors: Tensor | None) -> bool:
    """Whether the elementwise kernels take these: contiguous, not empty, of three floating types, on a GPU that Triton compiles for."""
    return all(x is None or _is_elementwise(x) for x in tensors) and _compiles()


def _is_elementwise(x: Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and x.dtype in ELEMENTWISE and x.numel() > 0


ELEMENTWISE = (torch.float16, torch.bfloat16, torch.float32)


@lru_cache(maxsize=1)
def _compiles() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)


def run_triton(p: Problem, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None) -> Tensor:
    """`triton_attention`, imported when first called."""
    from spa_dist.kernels.triton_attention import triton_attention

    return triton_attention(p, q, k, v, key_lengths)
