"""Flash attention by the Triton kernels: launches and the autograd function. CUDA, or any device in Triton's interpreter."""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from spa_dist.kernels.problem import Problem
from spa_dist.kernels.triton_backward import delta_kernel, dkdv_kernel, dq_kernel
from spa_dist.kernels.triton_config import QK_PARTS, config
from spa_dist.kernels.triton_forward import forward_kernel
from spa_dist.kernels.triton_interpreter import repair_bfloat16

repair_bfloat16()

_UNLIMITED = 1 << 30


def triton_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Attention of `spa_dist.kernels.attention`, differentiable once, deterministic; saves inputs, output and log-sum-exp.

    The output is saved in float32: dS = P ∘ (dO Vᵀ - Σ dO ∘ O) of a row with one large P is a small difference, which rounding O
    to half precision would drown (four times the error of torch's gradient of q, seen).
    """
    lengths = torch.full((p.batch,), p.keys, device=p.device) if key_lengths is None else key_lengths.to(p.device)
    return _Flash.apply(q_bhnd, k_bgmd, v_bgme, lengths.clamp(0, p.keys).to(torch.int32), p)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, p: Problem) -> Tensor:
        q, k, v = (_unit_last_stride(x) for x in (q, k, v))
        out = torch.empty(p.batch, p.heads, p.queries, p.d_v, dtype=torch.float32, device=p.device)
        lse = torch.empty(p.batch * p.heads, p.queries, dtype=torch.float32, device=p.device)
        c = config("forward", p.d_qk, p.d_v, p.dtype.itemsize)
        with torch.autocast(p.device.type, enabled=False):
            forward_kernel[triton.cdiv(p.queries, c.block_m), p.batch * p.heads, c.parts](
                q, k, v, out, lse, lengths,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
                p.heads, p.group, p.queries, p.keys, _shift(p), p.scale * math.log2(math.e), *dropout_arguments(p.dropout, p.seed),
                *QK_PARTS[p.d_qk], c.d_v, p.dropout > 0.0, precision(p.dtype), c.block_m, c.block_n,
                num_warps=c.warps, num_stages=c.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, lengths, out, lse)
        ctx.problem = p
        return out.to(p.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lengths, out, lse = ctx.saved_tensors
        p: Problem = ctx.problem
        d_out = _unit_last_stride(d_out.to(p.dtype))
        delta = torch.empty_like(lse)
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        c = config("dkdv", p.d_qk, p.d_v, p.dtype.itemsize)
        delta_kernel[triton.cdiv(p.queries, 32), p.batch * p.heads](
            out, d_out, delta, *out.stride()[:3], *d_out.stride()[:3], p.heads, p.queries, c.d_v, c.parts, 32
        )
        strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3]]
        sizes = [
            p.heads,
            p.group,
            p.queries,
            p.keys,
            _shift(p),
            p.scale,
            p.scale * math.log2(math.e),
            *dropout_arguments(p.dropout, p.seed),
        ]
        dkdv_kernel[triton.cdiv(p.keys, c.block_n), p.batch * p.kv_heads, c.parts](
            q, k, v, d_out, lse, delta, d_k, d_v, lengths, *strides, *d_k.stride()[:3], *d_v.stride()[:3], *sizes,
            *QK_PARTS[p.d_qk], c.d_v, c.parts, p.dropout > 0.0, precision(p.dtype), c.block_m, c.block_n,
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
        c = config("dq", p.d_qk, p.d_v, p.dtype.itemsize)
        dq_kernel[triton.cdiv(p.queries, c.block_m), p.batch * p.heads](
            q, k, v, d_out, lse, delta, d_q, lengths, *strides, *d_q.stride()[:3], *sizes,
            *QK_PARTS[p.d_qk], c.d_v, c.parts, p.dropout > 0.0, precision(p.dtype), c.block_m, c.block_n,
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
        return d_q, d_k, d_v, None, None


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies: float32 in three TF32 products, about float32's own accuracy; halves as they are."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def dropout_arguments(dropout: float, seed: int) -> tuple[int, int, int, float]:
    """(low word of the seed, high word, threshold, what is kept is multiplied by) as the kernels take them."""
    threshold = min((1 << 32) - 1, round(dropout * (1 << 32)))  # in units of 2^-32, against a Philox word
    seed &= (1 << 63) - 1
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32), _signed(threshold), 1.0 / (1.0 - threshold / (1 << 32))


def _signed(word: int) -> int:
    """The same 32 bits as a signed integer, so that the kernel's argument has one type whatever the value."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift(p: Problem) -> int:
    return p.causal_shift if p.causal else _UNLIMITED


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
