"""torch's own scaled_dot_product_attention, for short sequences on CPU and for equal widths."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spa_dist.kernels.problem import Problem, visible_keys, without_padding

SHORT = 128
"""Up to this many keys torch's overhead per call, a third of the tiled backend's, decides on CPU."""


def sdpa_refusal(p: Problem) -> str | None:
    """Why torch's attention cannot serve, or None."""
    if p.d_qk > p.d_v:
        return f"torch's fused attention needs equal widths, or queries that zeros can widen to d_v: {p.d_qk} > {p.d_v}"
    if p.dropout > 0.0:
        return "torch's attention takes its dropout mask from a global generator, not from the seed"
    if p.causal and p.queries > p.keys:
        return "a causal mask with more queries than keys leaves rows without a key, where torch's gradients are NaN"
    return None


def sdpa_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """torch's attention with this package's mask; rows that see no key give 0, as everywhere here.

    Its fused kernels want d_qk = d_v: queries and keys are widened with zeros, which changes no score. Where writing the scores
    out is faster (`_written_out`), that is what torch is asked for, at the widths as they are.
    """
    if _written_out(p):
        kernel = sdpa_kernel(SDPBackend.MATH) if p.d_qk == p.d_v else nullcontext()  # unequal widths have no other kernel
    else:
        kernel = nullcontext()
        q_bhnd, k_bgmd = (x if p.d_qk == p.d_v else F.pad(x, (0, p.d_v - p.d_qk)) for x in (q_bhnd, k_bgmd))
    with kernel:
        return _masked(p, q_bhnd, k_bgmd, v_bgme, key_lengths)


def _written_out(p: Problem) -> bool:
    """Training on CPU with few keys: torch's fused backward is slow in half precision, and in float32 the zeros cost more."""
    short = p.device.type == "cpu" and p.needs_grad and p.keys <= SHORT
    return short and (p.dtype != torch.float32 or (p.d_qk < p.d_v and p.keys > SHORT // 2))


def _masked(p: Problem, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None) -> Tensor:
    if key_lengths is None:
        plain = not p.causal or p.queries == p.keys
        seen = None if plain or p.queries == 1 else visible_keys(p, None)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=p.causal and plain, scale=p.scale, enable_gqa=p.group > 1
        )
    lengths = key_lengths.to(p.device)[:, None, None, None]
    seen = visible_keys(p, key_lengths) | (lengths <= 0)
    k, v = without_padding(p, k, key_lengths), without_padding(p, v, key_lengths)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=p.scale, enable_gqa=p.group > 1)
    return out.masked_fill(lengths <= 0, 0.0)
