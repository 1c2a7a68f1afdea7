"""Decoding: one query against a cache of keys and values, in three calls of torch.

At one query the work is to read the cache; with a few hundred keys whatever else a call does costs more than that.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem


def is_single_query(p: Problem) -> bool:
    """Whether `single_query_attention` may be tried: every key is seen, nothing is kept for a backward pass, no autocast is on."""
    plain = p.queries == 1 and not p.needs_grad and not p.has_lengths and p.dropout == 0.0
    return plain and not torch.is_autocast_enabled(p.device.type)


def single_query_attention(
    p: Problem, q_bh1d: Tensor, k_bgmd: Tensor, v_bgme: Tensor, *, product_dtype: torch.dtype
) -> Tensor | None:
    """softmax(scale q kᵀ) v, [batch, heads, 1, d_v]; None where one is NaN, as that of scores of -inf alone, which is another path's work.

    Scores and softmax are float32 at least; the product with v runs in `product_dtype`.
    """
    wide = torch.promote_types(p.dtype, torch.float32)
    z = p.batch * p.kv_heads
    if p.dtype != wide:
        q_bh1d, k_bgmd = q_bh1d.to(wide), k_bgmd.to(wide)
    if p.dtype != product_dtype:
        v_bgme = v_bgme.to(product_dtype)
    q_zrd = q_bh1d.reshape(z, p.group, p.d_qk)
    k_zdm = k_bgmd.reshape(z, p.keys, p.d_qk).transpose(1, 2)
    probabilities_zrm = torch.baddbmm(_unread(wide, p.device), q_zrd, k_zdm, beta=0, alpha=p.scale).softmax(-1)
    if wide != product_dtype:
        probabilities_zrm = probabilities_zrm.to(product_dtype)
    out_zre = torch.bmm(probabilities_zrm, v_bgme.reshape(z, p.keys, p.d_v))
    if math.isnan(out_zre.sum(dtype=wide).item()):
        return None
    out_bh1e = out_zre.view(p.batch, p.heads, 1, p.d_v)
    return out_bh1e if product_dtype == p.dtype else out_bh1e.to(p.dtype)


@lru_cache(maxsize=8)
def _unread(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A summand for `baddbmm` to ignore."""
    return torch.zeros((), dtype=dtype, device=device)
