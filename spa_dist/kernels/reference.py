"""Attention written out: the oracle that the other backends are compared with. Stores the scores, O(queries * keys)."""

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem, visible_keys, without_padding
from spa_dist.kernels.tiles import keep_mask, keep_scale, tiles


def reference_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """softmax(scale q kᵀ + mask) v by plain PyTorch, in float32 at least; differentiable any number of times.

    Its dropout mask is the tiled backend's.
    """
    work = torch.promote_types(p.dtype, torch.float32)
    with torch.autocast(p.device.type, enabled=False):
        q = q_bhnd.to(work)
        k, v = (_per_query_head(p, without_padding(p, x, key_lengths)).to(work) for x in (k_bgmd, v_bgme))
        visible = visible_keys(p, key_lengths)
        scores = ((q * p.scale) @ k.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        alive = scores.detach().amax(-1, keepdim=True) != -torch.inf
        probabilities = torch.softmax(scores.masked_fill(~alive, 0.0), -1) * alive
        if p.dropout > 0.0:
            probabilities = probabilities * full_keep_mask(p) * keep_scale(p.dropout)
        return (probabilities @ v).to(p.dtype)


def full_keep_mask(p: Problem) -> Tensor:
    """The tiles' dropout masks put together: bool [batch, heads, queries, keys]; what no tile covers is False."""
    keep = torch.zeros(p.batch * p.kv_heads, p.group, p.queries, p.keys, dtype=torch.bool, device=p.device)
    for t in tiles(p):
        keep[t.z0 : t.z1, :, t.i0 : t.i1, : t.keys] = keep_mask(p, t)
    return keep.view(p.batch, p.heads, p.queries, p.keys)


def _per_query_head(p: Problem, x_bgmw: Tensor) -> Tensor:
    return x_bgmw if p.group == 1 else x_bgmw.repeat_interleave(p.group, dim=1)
