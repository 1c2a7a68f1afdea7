"""Decoding: one query against a cache of keys and values, in three calls of torch.

At one query the work is to read the cache; with a few hundred keys whatever else a call does costs more than that.
"""

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
    """softmax(scale q kᵀ) v, [batch, heads, 1, d_v]; None where a softmax is NaN, as that of a row of -inf, which is another path's work.

    Scores and softmax are float32 at least; the product with v runs in `product_dtype`.
    """
    wide = torch.promote_types(p.dtype, torch.float32)
    z = p.batch * p.kv_heads
    q_zrd = q_bh1d.to(wide).reshape(z, p.group, p.d_qk)
    k_zdm = k_bgmd.to(wide).reshape(z, p.keys, p.d_qk).transpose(1, 2)
    scores_zrm = torch.baddbmm(q_zrd.new_empty(()), q_zrd, k_zdm, beta=0, alpha=p.scale)
    probabilities_zrm = scores_zrm.softmax(-1)
    if bool(probabilities_zrm[..., 0].sum().isnan()):
        return None
    v_zme = v_bgme.reshape(z, p.keys, p.d_v).to(product_dtype)
    return torch.bmm(probabilities_zrm.to(product_dtype), v_zme).view(p.batch, p.heads, 1, p.d_v).to(p.dtype)
