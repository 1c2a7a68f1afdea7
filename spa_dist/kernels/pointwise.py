"""The elementwise work around attention, with as little kept for the backward as the formulas allow: on GPUs one kernel a pass."""

import importlib
import importlib.util
import logging
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spa_dist.kernels.tiles import drop_threshold, keep_scale, seeded_levels
from spa_dist.kernels.triton_backend import serves_elementwise

log = logging.getLogger(__name__)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) with the exact (erf) gelu; x [..., width], bias [width]. The sum is written over x and kept there."""
    if serves_elementwise(x, bias):
        from spa_dist.kernels.triton_pointwise import triton_bias_gelu

        return triton_bias_gelu(x, bias)
    return _BiasGelu.apply(x, bias)


def bias_dropout_residual(x: Tensor, bias: Tensor | None, residual: Tensor, *, dropout: float, seed: int) -> Tensor:
    """residual + dropout(x + bias), written over x; x and residual [..., width], bias [width] or None.

    The mask is a function of `seed` and the shape, on GPUs another one than on CPUs: it is drawn again in the backward, and nothing
    is kept. ValueError where x and residual differ in shape.
    """
    if x.shape != residual.shape:
        raise ValueError(f"bias_dropout_residual: x {tuple(x.shape)} and residual {tuple(residual.shape)} must match")
    if serves_elementwise(x, bias, residual):
        from spa_dist.kernels.triton_pointwise import triton_bias_dropout_residual

        return triton_bias_dropout_residual(x, bias, residual, dropout, seed)
    return _BiasDropoutResidual.apply(x, bias, residual, dropout, seed)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension: NVIDIA Apex's fused kernel on CUDA where it is installed, torch's otherwise."""
    apex = _apex(x.device.type)
    if apex is not None and bias is not None:
        return apex.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: NVIDIA Apex's fused kernel on CUDA where it is installed, torch's otherwise."""
    apex = _apex(x.device.type)
    if apex is not None:
        return apex.fused_rms_norm_affine(x, weight, weight.shape, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


_APEX = ("apex", "apex.normalization", "fused_layer_norm_cuda")


@lru_cache
def _apex(device_type: str) -> Any:
    """The module of NVIDIA Apex's norms, or None; a package that is only called apex has none. Says once which it is."""
    if device_type != "cuda":
        log.info("norms: torch's (on %s; NVIDIA Apex's are for CUDA)", device_type)
        return None
    missing = next((name for name in _APEX if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        log.info("norms: torch's (NVIDIA Apex is not installed: no %s)", missing)
        return None
    log.info("norms: NVIDIA Apex's fused kernels")
    return importlib.import_module("apex.normalization.fused_layer_norm")


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        total = x.detach().add_(bias)
        ctx.save_for_backward(total, bias)
        return F.gelu(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        total, bias = ctx.saved_tensors
        d_x = torch.ops.aten.gelu_backward(d_out, total)
        return d_x, _column_sums(d_x, bias)


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.dropout, ctx.seed = dropout, seed
        out = x.detach()
        if bias is not None:
            out.add_(bias)
        if dropout > 0.0:
            out.mul_(_keep(out, dropout, seed)).mul_(keep_scale(dropout))
        return out.add_(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (bias,) = ctx.saved_tensors
        d_x = d_out
        if ctx.dropout > 0.0:
            d_x = (d_out * _keep(d_out, ctx.dropout, ctx.seed)).mul_(keep_scale(ctx.dropout))
        d_bias = None if bias is None else _column_sums(d_x, bias)
        return d_x, d_bias, d_out, None, None


def _keep(like: Tensor, dropout: float, seed: int) -> Tensor:
    return seeded_levels(like.numel(), seed, like.device).view(like.shape) >= drop_threshold(dropout) - (1 << 15)


def _column_sums(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(like.dtype)
