"""torch's FlexAttention, compiled: takes unequal widths; on CPU it has no backward."""

import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem, without_padding


def flex_refusal(p: Problem) -> str | None:
    """Why FlexAttention cannot serve, or None."""
    if p.device.type == "cpu" and p.needs_grad:
        return "FlexAttention has no backward on CPU (call it under torch.no_grad())"
    if p.device.type == "cpu" and all(shutil.which(compiler) is None for compiler in ("g++", "clang++")):
        return "FlexAttention is compiled on first use, and no C++ compiler (g++ or clang++) is on the PATH"
    if p.device.type not in ("cpu", "cuda"):
        return f"FlexAttention serves CPU and CUDA, not {p.device.type}"
    if p.dropout > 0.0:
        return "FlexAttention has no dropout"
    if p.dtype == torch.float64:
        return "FlexAttention takes float16, bfloat16 and float32, not float64"
    return None


def flex_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """FlexAttention with a block mask; compiled once per shape, which takes some ten seconds."""
    lengths = None if key_lengths is None else key_lengths.to(p.device)
    mask = _block_mask(p, lengths) if p.causal or lengths is not None else None
    k, v = without_padding(p, k_bgmd, key_lengths), without_padding(p, v_bgme, key_lengths)
    return _compiled()(q_bhnd, k, v, block_mask=mask, scale=p.scale, enable_gqa=p.group > 1)


def _block_mask(p: Problem, lengths: Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    shift = p.causal_shift

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i + shift if p.causal else j >= 0
        return seen if lengths is None else seen & (j < lengths[b])

    batch = None if lengths is None else p.batch
    return create_block_mask(visible, batch, None, p.queries, p.keys, device=p.device)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as eager

    return torch.compile(eager, dynamic=False)
