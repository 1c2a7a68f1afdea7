"""Attention in tiles of whole score rows, on any device's matrix product; keeps its inputs and output and nothing else.

Forward, per tile: S = scale q kᵀ, P = softmax(S), o = P v. Backward recomputes S and P of the tile, then dV += Pᵀ dO,
dP = dO Vᵀ, dS = P ∘ (dP - Σ P ∘ dP), dQ = dS K, dK += dSᵀ Q. Half-precision inputs keep scores, softmax and every sum over
tiles in float32; products of width d_v run in the inputs' dtype, except in tiles of few keys, where rounding the probabilities
would not average out.
"""

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spa_dist.kernels.problem import Problem, without_padding
from spa_dist.kernels.single_query import is_single_query, single_query_attention
from spa_dist.kernels.tiles import Tile, corner_limits, keep_mask, keep_scale, score_limits, tiles


def tiled_attention(p: Problem, q_bhnd: Tensor, k_bgmd: Tensor, v_bgme: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Attention of `spa_dist.kernels.attention`, differentiable once, deterministic on CPU."""
    if is_single_query(p):
        out = single_query_attention(p, q_bhnd, k_bgmd, v_bgme, product_dtype=_product_dtype(p, p.keys))
        if out is not None:
            return out
    if p.needs_grad:
        return _Tiled.apply(q_bhnd, k_bgmd, v_bgme, key_lengths, p)
    with _without_autocast(p.device):
        return _forward(_Operands(p, q_bhnd, k_bgmd, v_bgme, key_lengths))


HALF_PRODUCT_KEYS = 128
"""From this many keys on, a tile's products of width d_v run in half precision; in float16 on GPUs alone (on CPUs three times slower)."""
FEW_MATRICES = 16
"""Up to here torch adds products to a part of a tensor fast enough; it does so one matrix at a time."""
KEPT_BYTES = 16 << 20
"""Largest scratch tile that a thread keeps between calls; there are two."""


def _product_dtype(p: Problem, keys: int) -> torch.dtype:
    half = keys >= HALF_PRODUCT_KEYS and not (p.device.type == "cpu" and p.dtype == torch.float16)
    return p.dtype if half else torch.promote_types(p.dtype, torch.float32)


_kept = threading.local()


def _kept_scratch() -> dict[int, Tensor]:
    """This thread's scratch tiles, kept from call to call: fresh pages cost a fifth of a forward pass at 2,048 positions.

    What a very long sequence needed is let go at the next call.
    """
    if not hasattr(_kept, "scratch"):
        _kept.scratch = {}
    for which in [which for which, tile in _kept.scratch.items() if tile.numel() > KEPT_BYTES]:
        del _kept.scratch[which]
    return _kept.scratch


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, p: Problem) -> Tensor:
        with _without_autocast(p.device):
            x = _Operands(p, q, k, v, key_lengths)
            out = _forward(x)
        ctx.save_for_backward(q, k, v, key_lengths, out)
        ctx.problem, ctx.careful = p, x.careful
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_lengths, out = ctx.saved_tensors
        p: Problem = ctx.problem
        with torch.no_grad(), _without_autocast(p.device):
            x = _Operands(p, q, k, v, key_lengths)
            x.careful = ctx.careful
            d_q, d_k, d_v = _backward(x, out, d_out)
        return d_q, d_k, d_v, None, None


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


class _Operands:
    """The inputs as the tiles read them: folded to z = batch * kv_heads, queries scaled, padding zeroed.

    careful: rows without a finite score give 0, and a hidden score may be NaN. It costs a pass or two over the scores, and is needed
    only where the plain way gives NaN.
    """

    def __init__(self, p: Problem, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None) -> None:
        self.p = p
        self.careful = False
        self.score_dtype = torch.promote_types(p.dtype, torch.float32)
        z = p.batch * p.kv_heads
        self.q_zrnd = (q.to(self.score_dtype) * p.scale).reshape(z, p.group, p.queries, p.d_qk)
        k, v = without_padding(p, k, key_lengths), without_padding(p, v, key_lengths)
        self.k_zmd = k.to(self.score_dtype).reshape(z, p.keys, p.d_qk)
        self.v_zme = v.reshape(z, p.keys, p.d_v)
        self.lengths_z: list[int] | None = None
        if key_lengths is not None:
            lengths = key_lengths.to(p.device).clamp(0, p.keys).repeat_interleave(p.kv_heads)
            self.lengths_z = lengths.tolist()
            hidden_zm = torch.arange(p.keys, device=p.device) >= lengths[:, None]
            self.limits_zm = score_limits(hidden_zm, self.score_dtype)
        self.scratch: dict[int, Tensor] = _kept_scratch() if p.device.type == "cpu" else {}

    def buffer(self, which: int, *shape: int) -> Tensor:
        """One of two scratch tiles, grown as needed and reused by every tile."""
        size = math.prod(shape) * self.score_dtype.itemsize
        if which not in self.scratch or self.scratch[which].numel() < size:
            self.scratch[which] = torch.empty(size, dtype=torch.uint8, device=self.p.device)
        return self.scratch[which][:size].view(self.score_dtype).view(shape)

    def tiles(self) -> Sequence[Tile]:
        """The tiles that hold at least one visible key, cut at the longest sequence of each."""
        if self.lengths_z is None:
            return tiles(self.p)
        cut = [replace(t, keys=min(t.keys, max(self.lengths_z[t.z0 : t.z1]))) for t in tiles(self.p)]
        return [t for t in cut if t.keys > 0]

    def queries(self, t: Tile) -> Tensor:
        """Scaled queries [z, r * rows, d]."""
        return self.q_zrnd[t.z0 : t.z1, :, t.i0 : t.i1].reshape(t.z1 - t.z0, -1, self.p.d_qk)

    def probabilities(self, t: Tile) -> Tensor:
        """softmax(S) of a tile, before dropout: [z, r * rows, keys]."""
        probabilities = self._scores(t)
        if not self.careful:
            return torch.softmax(probabilities, -1, out=probabilities)
        hidden = probabilities.amax(-1, keepdim=True) == -torch.inf
        torch.softmax(probabilities, -1, out=probabilities)
        return probabilities.masked_fill_(hidden, 0.0)

    def _scores(self, t: Tile) -> Tensor:
        p, q_tile = self.p, self.queries(t)
        scores = self.buffer(0, *q_tile.shape[:2], t.keys)
        torch.bmm(q_tile, self.k_zmd[t.z0 : t.z1, : t.keys].transpose(1, 2), out=scores)
        by_head = scores.view(t.z1 - t.z0, p.group, t.i1 - t.i0, t.keys)
        corner = t.i0 + p.causal_shift
        if p.causal and corner < t.keys:
            self._hide(by_head[..., corner:], corner_limits(t.i1 - t.i0, t.keys - corner, scores.dtype, p.device))
        if self.lengths_z is not None and (shortest := min(self.lengths_z[t.z0 : t.z1])) < t.keys:
            self._hide(by_head[..., shortest:], self.limits_zm[t.z0 : t.z1, None, None, shortest : t.keys])
        return scores

    def _hide(self, scores: Tensor, limits: Tensor) -> None:
        if self.careful:
            scores.masked_fill_(limits == -torch.inf, -torch.inf)
        else:
            scores.clamp_max_(limits)  # a seventh of the time, and a NaN stays

    def product_dtype(self, t: Tile) -> torch.dtype:
        """What the products of width d_v run in."""
        return _product_dtype(self.p, t.keys)

    def values(self, t: Tile) -> Tensor:
        """The tile's values [z, keys, d_v] in `product_dtype`."""
        return self.v_zme[t.z0 : t.z1, : t.keys].to(self.product_dtype(t))

    def kept(self, t: Tile, full_keys: int) -> Tensor | None:
        """The tile's dropout mask [z, r * rows, keys], or None without dropout."""
        if self.p.dropout == 0.0:
            return None
        mask = keep_mask(self.p, replace(t, keys=full_keys))
        return mask.view(t.z1 - t.z0, -1, full_keys)[..., : t.keys]

    def full_keys(self, t: Tile) -> int:
        """Keys of the tile before sequence lengths cut it: what the dropout mask's layout depends on."""
        return min(self.p.keys, t.i1 + self.p.causal_shift) if self.p.causal else self.p.keys


def _forward(x: _Operands) -> Tensor:
    out = _forward_tiles(x)
    one = out[..., 0].sum(dtype=x.score_dtype).item()  # NaN if any probability is
    if math.isnan(one):
        x.careful = True
        out = _forward_tiles(x)
    return out


def _forward_tiles(x: _Operands) -> Tensor:
    p = x.p
    out_zrne = torch.empty(p.batch * p.kv_heads, p.group, p.queries, p.d_v, dtype=p.dtype, device=p.device)
    if x.lengths_z is not None or (p.causal and p.causal_shift < 0):
        out_zrne.zero_()
    for t in x.tiles():
        probabilities = x.probabilities(t)
        keep = x.kept(t, x.full_keys(t))
        if keep is not None:
            probabilities.mul_(keep)
        out = torch.bmm(probabilities.to(x.product_dtype(t)), x.values(t))
        if keep is not None:
            out.mul_(keep_scale(p.dropout))
        out_zrne[t.z0 : t.z1, :, t.i0 : t.i1] = out.view(t.z1 - t.z0, p.group, t.i1 - t.i0, p.d_v)
    return out_zrne.view(p.batch, p.heads, p.queries, p.d_v)


def _backward(x: _Operands, out: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = x.p
    folded = (p.batch * p.kv_heads, p.group, p.queries, p.d_v)
    out_zrne, d_out_zrne = out.view(folded), d_out.reshape(folded)
    if p.dropout > 0.0:
        d_out_zrne = d_out_zrne * keep_scale(p.dropout)
    d_q = torch.zeros_like(x.q_zrnd)
    d_k = torch.zeros_like(x.k_zmd)
    d_v = torch.zeros_like(x.v_zme, dtype=x.score_dtype)
    for t in x.tiles():
        z, keys = slice(t.z0, t.z1), slice(0, t.keys)
        probabilities = x.probabilities(t)
        keep = x.kept(t, x.full_keys(t))
        d_out_tile = d_out_zrne[z, :, t.i0 : t.i1].reshape(t.z1 - t.z0, -1, p.d_v).to(x.product_dtype(t))
        dropped = probabilities if keep is None else probabilities * keep
        _accumulate(d_v[z, keys], dropped.to(d_out_tile.dtype).transpose(1, 2), d_out_tile)
        d_probabilities = x.buffer(1, *probabilities.shape)
        _d_probabilities(d_probabilities, d_out_tile, out_zrne[z, :, t.i0 : t.i1], x.values(t), keep)
        d_scores = torch._softmax_backward_data(
            d_probabilities, probabilities, -1, x.score_dtype, grad_input=d_probabilities
        )
        d_q_tile = torch.bmm(d_scores, x.k_zmd[z, keys])
        d_q[z, :, t.i0 : t.i1] = d_q_tile.view(t.z1 - t.z0, p.group, t.i1 - t.i0, p.d_qk)
        _accumulate(d_k[z, keys], d_scores.transpose(1, 2), x.queries(t))
    shape_kv = (p.batch, p.kv_heads, p.keys)
    return (
        d_q.mul_(p.scale).view(p.batch, p.heads, p.queries, p.d_qk).to(p.dtype),
        d_k.view(*shape_kv, p.d_qk).to(p.dtype),
        d_v.view(*shape_kv, p.d_v).to(p.dtype),
    )


def _d_probabilities(result: Tensor, d_out_tile: Tensor, out_tile: Tensor, v: Tensor, keep: Tensor | None) -> None:
    """result = dO vᵀ ∘ keep, up to a constant per row where there is no dropout (which the softmax's gradient removes).

    In half precision the product is rounded; taking the row's mean dO · o off inside the product leaves only numbers of the
    size of dS to round, so that values with a large common part cost no digits.
    """
    if result.dtype == v.dtype:
        torch.bmm(d_out_tile, v.transpose(1, 2), out=result)
    else:
        mean = (d_out_tile * out_tile.reshape(d_out_tile.shape)).sum(-1, keepdim=True)
        result.copy_(torch.baddbmm(mean.expand(result.shape), d_out_tile, v.transpose(1, 2), beta=-1))
        if keep is not None:
            result.add_(mean)
    if keep is not None:
        result.mul_(keep)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, where total may be wider than the operands' dtype."""
    if total.dtype == a.dtype and (total.is_contiguous() or len(total) <= FEW_MATRICES):
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)
