"""torch's own scaled_dot_product_attention, where it has a fused kernel for the problem."""

import torch.nn.functional as F
from torch import Tensor

from spa_dist.kernels.problem import Problem, visible_keys, without_padding


def sdpa_refusal(p: Problem) -> str | None:
    """Why torch's fused attention cannot serve, or None."""
    if p.d_qk != p.d_v:
        return f"torch's fused attention needs equal widths, and d_qk = {p.d_qk}, d_v = {p.d_v}"
    if p.dropout > 0.0:
        return "torch's attention takes its dropout mask from a global generator, not from the seed"
    if p.causal and p.queries > p.keys:
        return "a causal mask with more queries than keys leaves rows without a key, where torch's gradients are NaN"
    return None


def sdpa_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """torch's attention with this package's mask; rows that see no key give 0, as everywhere here."""
    if key_lengths is None:
        plain = not p.causal or p.queries == p.keys
        mask = None if plain else visible_keys(p, None)
        return F.scaled_dot_product_attention(
            q_bhnd, k_bgmd, v_bgme, attn_mask=mask, is_causal=p.causal and plain, scale=p.scale, enable_gqa=p.group > 1
        )
    lengths = key_lengths.to(p.device)[:, None, None, None]
    mask = visible_keys(p, key_lengths) | (lengths <= 0)
    k, v = without_padding(p, k_bgmd, key_lengths), without_padding(p, v_bgme, key_lengths)
    out = F.scaled_dot_product_attention(q_bhnd, k, v, attn_mask=mask, scale=p.scale, enable_gqa=p.group > 1)
    return out.masked_fill(lengths <= 0, 0.0)
