"""Sparse Projection Attention as a module for anybody's model."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spa_dist.attention.folding import fold_projection, on_support, project
from spa_dist.attention.gating import fold_gate
from spa_dist.attention.masks.learned import LEARNED_PATTERNS, LearnedProjection, MaskMethod
from spa_dist.attention.projection import make_projection, num_projections
from spa_dist.attention.rotary import apply_rotary, rotary_tables
from spa_dist.attention.widths import logit_scale
from spa_dist.kernels import attention


class _Heads(NamedTuple):
    """Queries and keys after S, and values: [batch, N, heads or kv_heads, width]."""

    q_bnhp: Tensor
    k_bmgp: Tensor
    v_bmgv: Tensor


class SparseProjectionAttention(nn.Module):
    """softmax(scale · (Q S)(K S)ᵀ) V over heads, then an output layer (Sections 3.1.2, 3.1.3 and Algorithm 1).

    Widths: embed_dim D; d_k = head_dim, D / num_heads unless given; d_v = value_dim, d_k unless given; d_proj = d_k′ ≤ d_k,
    the width at which queries and keys meet. num_kv_heads < num_heads is grouped-query attention.

    pattern, sparsity, seed, **pattern_options: how S is drawn, see `make_projection`. per: one S for the "layer" or one per
    key/value "head" (always so for "head_specific"). trainable: S is a parameter whose zeros stay zero; else it is a buffer.
    scale: see `logit_scale`. fold: multiply S into the query and key weights at each call, then one GEMM for queries, keys
    and values; exact, and cheaper beyond about d_k d_k′/(d_k - d_k′) tokens a call. It reads the weights of `query`, `key`
    and `value` without calling these layers: adapters that wrap them (LoRA, quantisation) need fold=False.
    rope: rotary positions on d_k′, after S, with base rope_theta. dropout: of the attention probabilities, in training.
    backend: of the attention kernel. bias: on all four linear layers. context_dim: width of the context, embed_dim unless
    given.
    mask: how the mask of S is trained, for the patterns "learned" and "adaptive"; S starts as `start` draws it at
    start_sparsity, and `spa_dist.attention.masks.plain` shows the training loop. gate: a learned temperature exp(g) on the
    logits of each head; by default "adaptive" has it.

    State: query, key, value and output (Linear layers); projection, S [1 or num_kv_heads, d_k, d_k′] or the `LearnedProjection`
    that makes it; gate [num_heads].
    Raises ValueError, in one line, for arguments that do not fit.
    """

    projection: Tensor | LearnedProjection

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        d_proj: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        pattern: str = "random",
        sparsity: float = 0.8,
        scale: str | float = "paper",
        per: str = "layer",
        fold: bool = True,
        bias: bool = False,
        rope: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
        seed: int = 0,
        context_dim: int | None = None,
        rope_theta: float = 10000.0,
        trainable: bool = False,
        mask: MaskMethod | None = None,
        start: str = "gaussian",
        start_sparsity: float = 0.0,
        gate: bool | None = None,
        **pattern_options,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.d_proj = embed_dim, num_heads, d_proj
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(embed_dim, num_heads, head_dim)
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}")
        if rope and d_proj % 2:
            raise ValueError(f"rope rotates pairs of projected features: d_proj must be even, not {d_proj}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {dropout!r}")
        self.pattern, self.fold, self.rope, self.rope_theta = pattern, fold, rope, rope_theta
        self.dropout, self.backend = dropout, backend
        self.scale = logit_scale(scale, self.head_dim, d_proj)

        learned = pattern in LEARNED_PATTERNS
        if learned != (mask is not None):
            raise ValueError(
                f"pattern {pattern!r} and mask do not fit: {' and '.join(LEARNED_PATTERNS)} need one, no other has one"
            )
        drawn_pattern, drawn_sparsity = (start, start_sparsity) if learned else (pattern, sparsity)
        count = num_projections(drawn_pattern, per, self.num_kv_heads)
        drawn = make_projection(
            drawn_pattern, self.head_dim, d_proj, num_heads=count, sparsity=drawn_sparsity, seed=seed, **pattern_options
        ).to(torch.get_default_dtype())
        if mask is not None:
            self.projection = LearnedProjection(mask, (count, self.head_dim, d_proj), seed=seed, name="attention")
            self.projection.load_state_dict(mask.initial(drawn))
        elif trainable:
            self.projection = nn.Parameter(drawn)
        else:
            self.register_buffer("projection", drawn)
        gated = pattern == "adaptive" if gate is None else gate
        self.gate = nn.Parameter(torch.zeros(num_heads)) if gated else None

        context_dim = embed_dim if context_dim is None else context_dim
        self.query = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(context_dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(context_dim, self.num_kv_heads * self.value_dim, bias=bias)
        self.output = nn.Linear(num_heads * self.value_dim, embed_dim, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, causal: bool = False, key_lengths: Tensor | None = None
    ) -> Tensor:
        """Attend from x [batch, N, embed_dim] to context [batch, M, context_dim], or to x itself. Returns x's shape.

        causal: query i sees keys j ≤ i + M - N, so the last query sees all. key_lengths: integers [batch], keys at or past
        them are padding. A query that sees no key attends to nothing (its output is the output layer's bias). With rope,
        keys stand at 0 … M-1 and queries at 0 … N-1, or, when causal, at M-N … M-1, beside the newest key they see.
        """
        heads = self._folded(x, context) if self.fold else self._unfolded(x, x if context is None else context)
        q_bhnp, k_bgmp, v_bgmv = (tensor.transpose(1, 2) for tensor in heads)
        if self.rope:
            q_bhnp, k_bgmp = self._rotate(q_bhnp, k_bgmp, causal)
        dropout = self.dropout if self.training else 0.0
        o_bhnv = attention(
            q_bhnp,
            k_bgmp,
            v_bgmv,
            scale=self.scale,
            causal=causal,
            key_lengths=key_lengths,
            dropout=dropout,
            seed=_fresh_seed() if dropout else 0,
            backend=self.backend,
        )
        return self.output(o_bhnv.transpose(1, 2).flatten(2))

    def _unfolded(self, x: Tensor, context: Tensor) -> _Heads:
        projection = self._effective_projection()
        q_bnhk = self.query(x).unflatten(-1, (self.num_heads, self.head_dim))
        if self.gate is not None:
            q_bnhk = q_bnhk * self.gate.to(q_bnhk.dtype).exp().unsqueeze(-1)
        k_bmgk = self.key(context).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_bmgv = self.value(context).unflatten(-1, (self.num_kv_heads, self.value_dim))
        return _Heads(project(q_bnhk, projection), project(k_bmgk, projection), v_bmgv)

    def _folded(self, x: Tensor, context: Tensor | None) -> _Heads:
        projection = self._effective_projection()
        query, key = _fold(self.query, projection, self.gate), _fold(self.key, projection)
        value = (self.value.weight, self.value.bias)
        if context is None:
            q, k, v = _stacked(x, query, key, value)
        else:
            (q,) = _stacked(x, query)
            k, v = _stacked(context, key, value)
        return _Heads(
            q.unflatten(-1, (self.num_heads, self.d_proj)),
            k.unflatten(-1, (self.num_kv_heads, self.d_proj)),
            v.unflatten(-1, (self.num_kv_heads, self.value_dim)),
        )

    def _effective_projection(self) -> Tensor:
        if isinstance(self.projection, LearnedProjection):
            return self.projection()
        return on_support(self.projection) if isinstance(self.projection, nn.Parameter) else self.projection

    def _rotate(self, q_bhnp: Tensor, k_bgmp: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        queries, keys = q_bhnp.shape[-2], k_bgmp.shape[-2]
        dtype = torch.promote_types(q_bhnp.dtype, torch.float32)
        q_positions = torch.arange(queries, device=q_bhnp.device) + (keys - queries if causal else 0)
        q_tables = rotary_tables(q_positions, self.d_proj, self.rope_theta, dtype)
        k_tables = rotary_tables(keys, self.d_proj, self.rope_theta, dtype, k_bgmp.device)
        return apply_rotary(q_bhnp, *q_tables), apply_rotary(k_bgmp, *k_tables)

    def extra_repr(self) -> str:
        """The facts of S and of the heads; the density is measured on S as it is now."""
        projection = self.projection
        if isinstance(projection, LearnedProjection):
            projection = projection.method.final_projection(projection.tensors())
        density = "?" if projection.is_meta else f"{float((projection != 0).double().mean()):.3f}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"d_k={self.head_dim}, d_k′={self.d_proj}, d_v={self.value_dim}, "
            f"pattern={self.pattern}, density={density}, projections={projection.shape[0]}, gate={self.gate is not None}, "
            f"scale={self.scale:.4g}, fold={self.fold}, rope={self.rope}, dropout={self.dropout}"
        )


def _head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if num_heads < 1:
        raise ValueError(f"num_heads must be a positive integer, not {num_heads!r}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim = {embed_dim} is not a multiple of num_heads = {num_heads}: give head_dim")
    return embed_dim // num_heads if head_dim is None else head_dim


def _fold(linear: nn.Linear, projection: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    weight = fold_projection(linear.weight, projection)
    bias = None if linear.bias is None else fold_projection(linear.bias, projection)
    if gate is None:
        return weight, bias
    return fold_gate(weight, gate), None if bias is None else fold_gate(bias, gate)


def _stacked(x: Tensor, *layers: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """The outputs of several linear layers (weight, bias) of one input, computed as one GEMM."""
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers if bias is not None]
    together = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return together.split([len(weight) for weight in weights], dim=-1)


def _fresh_seed() -> int:
    """From torch's default CPU generator: `torch.manual_seed` reproduces it, and checkpointing recomputes with the same."""
    return int(torch.randint(2**31 - 1, (), device="cpu"))
