"""cuDNN's attention through torch: half precision on CUDA, unequal widths up to 128."""

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem
from spa_dist.kernels.sdpa import sdpa_attention


def cudnn_refusal(p: Problem) -> str | None:
    """Why cuDNN's attention cannot serve, or None."""
    if p.device.type != "cuda":
        return f"cuDNN needs a CUDA device, and the tensors are on {p.device.type}"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN's attention takes float16 and bfloat16, not {str(p.dtype).removeprefix('torch.')}"
    if max(p.d_qk, p.d_v) > 128 or p.d_qk % 8 or p.d_v % 8:
        return f"cuDNN's attention takes widths up to 128 in steps of 8, and d_qk = {p.d_qk}, d_v = {p.d_v}"
    if p.dropout > 0.0:
        return "torch's cuDNN attention takes its dropout mask from a global generator, not from the seed"
    if p.has_lengths or (p.causal and p.queries != p.keys):
        return "it is used here without a mask tensor: no key_lengths, and causal only with as many queries as keys"
    return None


def cudnn_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """torch's attention with every backend but cuDNN's switched off."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention(p, q_bhnd, k_bgmd, v_bgme, key_lengths)
