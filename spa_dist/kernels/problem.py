"""One attention call, checked: the shapes, the mask and the dropout that every backend receives.

Letters used in tensor names of this package: b batch, h query heads, g key/value heads, r query heads per key/value head
(h = g * r), n queries, m keys, d query/key width (d_qk), e value width (d_v), z a folded batch of b * g.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    """Everything about a call to `attention` but the tensors themselves."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d_qk: int
    d_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool
    dropout: float
    seed: int
    has_lengths: bool
    needs_grad: bool

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def causal_shift(self) -> int:
        """Query i sees keys j <= i + causal_shift: the last query sees the last key."""
        return self.keys - self.queries

    @property
    def empty(self) -> bool:
        """Nothing to compute: no output element, or no key to look at."""
        return 0 in (self.batch, self.heads, self.queries, self.keys, self.d_v)


def make_problem(
    q_bhnd: Tensor,
    k_bgmd: Tensor,
    v_bgme: Tensor,
    *,
    scale: float,
    causal: bool,
    key_lengths: Tensor | None,
    dropout: float,
    seed: int,
) -> Problem:
    """Check the arguments of `attention` against each other; ValueError names the first that does not fit."""
    dtype, device = q_bhnd.dtype, q_bhnd.device
    for name, tensor in (("q", q_bhnd), ("k", k_bgmd), ("v", v_bgme)):
        if tensor.dim() != 4:
            raise ValueError(f"attention: {name} must be [batch, heads, length, width], got {tuple(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"attention: q, k and v must share dtype and device, {name} is {tensor.dtype} on {tensor.device} "
                f"and q is {dtype} on {device}"
            )
    if dtype not in FLOATS:
        raise ValueError(f"attention: dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    batch, heads, queries, d_qk = q_bhnd.shape
    kv_heads, keys = k_bgmd.shape[1:3]
    if k_bgmd.shape != (batch, kv_heads, keys, d_qk) or v_bgme.shape[:3] != (batch, kv_heads, keys):
        raise ValueError(
            f"attention: shapes do not match, q {tuple(q_bhnd.shape)} k {tuple(k_bgmd.shape)} v {tuple(v_bgme.shape)}; "
            "k must have q's batch and width, v must have k's batch, heads and length"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"attention: query heads ({heads}) must be a multiple of key/value heads ({kv_heads})")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"attention: dropout must be in [0, 1), got {dropout}")
    if key_lengths is not None and (key_lengths.shape != (batch,) or key_lengths.is_floating_point()):
        raise ValueError(
            f"attention: key_lengths must be integers of shape [{batch}], got {key_lengths.dtype} {tuple(key_lengths.shape)}"
        )
    needs_grad = torch.is_grad_enabled() and (q_bhnd.requires_grad or k_bgmd.requires_grad or v_bgme.requires_grad)
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        d_qk=d_qk,
        d_v=v_bgme.shape[3],
        dtype=dtype,
        device=device,
        scale=float(scale),
        causal=bool(causal),
        dropout=float(dropout),
        seed=int(seed),
        has_lengths=key_lengths is not None,
        needs_grad=needs_grad,
    )


def visible_keys(p: Problem, key_lengths: Tensor | None) -> Tensor:
    """Which keys each query may see: bool [batch, 1, queries, keys] (batch 1 when there are no lengths)."""
    j = torch.arange(p.keys, device=p.device)
    visible = torch.ones(1, 1, p.queries, p.keys, dtype=torch.bool, device=p.device)
    if p.causal:
        visible = j <= torch.arange(p.queries, device=p.device)[:, None] + p.causal_shift
        visible = visible[None, None]
    if key_lengths is not None:
        visible = visible & (j < key_lengths.to(p.device)[:, None])[:, None, None, :]
    return visible


def without_padding(p: Problem, x_bgmw: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Keys or values with 0 past each sequence's length, so that a weight of 0 never meets a NaN."""
    if key_lengths is None:
        return x_bgmw
    padding = torch.arange(p.keys, device=p.device)[:, None] >= key_lengths.to(p.device)[:, None, None, None]
    return x_bgmw.masked_fill(padding, 0.0)
