"""The tensor-parallel attention layer: dense, thin, or with a sparse projection S on queries and keys."""

from typing import Any

import torch
from torch import nn

from spa_dist import kernels
from spa_dist.attention import (
    apply_rotary,
    fold_gate,
    fold_projection,
    logit_scale,
    on_support,
    project,
    query_key_width,
)
from spa_dist.attention.masks import LearnedProjection
from spa_dist.config import Config
from spa_dist.errors import ConfigError
from spa_dist.model.masks import mask_method
from spa_dist.model.noise import Noise
from spa_dist.parallel.layers import Norm, RowLinear, column_parallel_linear, sum_gradient
from spa_dist.parallel.layout import projection_is_per_head, query_key_parameter_width
from spa_dist.parallel.megatron import ModelParallelConfig

RotaryTables = tuple[torch.Tensor, torch.Tensor]


class ParallelAttention(nn.Module):
    """Causal self-attention over this rank's heads.

    S is folded: W_Q·S and W_K·S are formed once per call and, with W_V, applied in one GEMM, so that the projection costs
    nothing per token and the QKV product itself shrinks from d_k to d_k′ per query and key head. Per layer S is replicated and
    its gradient summed over the tensor-parallel group; per head it is split with the heads. A learned S comes from a
    `LearnedProjection`. The gate exp(g) of a head multiplies its query weights.
    """

    def __init__(self, config: Config, index: int, parallel: ModelParallelConfig, noise: Noise):
        super().__init__()
        model, attention = config.model, config.attention
        assert model.num_kv_heads and model.head_dim and model.value_dim and attention.d_proj
        size = parallel.tensor_model_parallel_size
        self.config, self.parallel, self.noise, self.index = config, parallel, noise, index
        self.num_heads, self.num_kv_heads = model.num_heads // size, model.num_kv_heads // size
        self.value_dim = model.value_dim
        self.parameter_width = query_key_parameter_width(config)
        self.width = query_key_width(attention.kind, model.head_dim, attention.d_proj)
        self.scale = logit_scale(attention.scale if attention.kind == "spa" else "paper", model.head_dim, self.width)

        hidden = model.hidden_size
        self.query_weight = nn.Parameter(torch.empty(self.num_heads * self.parameter_width, hidden))
        self.key_weight = nn.Parameter(torch.empty(self.num_kv_heads * self.parameter_width, hidden))
        self.value_weight = nn.Parameter(torch.empty(self.num_kv_heads * self.value_dim, hidden))
        for name in ("query", "key", "value"):
            weight = getattr(self, f"{name}_weight")
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(weight.shape[0])) if model.bias else None)
        self._register_projection(size)
        self.gate = nn.Parameter(torch.empty(self.num_heads)) if attention.gate else None
        if attention.qk_norm:
            # Each rank normalises its own heads, so the gradient of the replicated weight is a sum over ranks.
            self.query_norm = Norm(self.width, kind="rmsnorm", eps=model.norm_eps, sum_gradients=True)
            self.key_norm = Norm(self.width, kind="rmsnorm", eps=model.norm_eps, sum_gradients=True)
        self.output = RowLinear(model.num_heads * self.value_dim, hidden, bias=model.bias, config=parallel)

    def _register_projection(self, tensor_size: int) -> None:
        model, attention = self.config.model, self.config.attention
        self.projection: torch.Tensor | LearnedProjection | None
        if attention.kind != "spa":
            self.register_buffer("projection", None)
            return
        self.projection_is_split = projection_is_per_head(self.config)
        heads = self.num_kv_heads if self.projection_is_split else 1
        method = mask_method(self.config)
        if method is not None:
            assert model.head_dim and attention.d_proj
            self.projection = LearnedProjection(
                method,
                (heads, model.head_dim, attention.d_proj),
                seed=self.config.run.seed,
                name=f"layers.{self.index}",
                head_offset=heads * self.noise.tensor_rank if self.projection_is_split else 0,
                total_heads=heads * tensor_size if self.projection_is_split else 1,
            )
            return
        projection = torch.empty(heads, model.head_dim, attention.d_proj)  # type: ignore[arg-type]
        if attention.trainable:
            self.projection = nn.Parameter(projection)
        else:
            self.register_buffer("projection", projection)

    def _projection(self) -> torch.Tensor | None:
        """S [1 or kv heads of this rank, d_k, d_k′]; its gradient, where it has one, is that of all heads that share it."""
        projection = self.projection
        if isinstance(projection, LearnedProjection):
            projection.step = self.noise.step
            projection = projection()
        elif projection is None or not projection.requires_grad:
            return projection
        else:
            projection = on_support(projection)
        return projection if self.projection_is_split else sum_gradient(projection)

    def _folded(self, name: str, projection: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of queries or keys, the gate and S multiplied in."""
        tensors: list[torch.Tensor | None] = []
        for kind in ("weight", "bias"):
            tensor = getattr(self, f"{name}_{kind}")
            if tensor is not None and projection is not None:
                tensor = fold_projection(tensor, projection)
            if tensor is not None and name == "query" and self.gate is not None:
                tensor = fold_gate(tensor, self.gate)
            tensors.append(tensor)
        weight, bias = tensors
        assert weight is not None
        return weight, bias

    def _query_key_value(self, x_nbd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [B, heads, N, d_qk] and values [B, heads, N, d_v], as views of one product."""
        projection = self._projection()
        fold = self.config.attention.fold
        (query_weight, query_bias), (key_weight, key_bias) = (
            self._folded(name, projection if fold else None) for name in ("query", "key")
        )
        weight = torch.cat([query_weight, key_weight, self.value_weight])
        bias = None if self.value_bias is None else torch.cat([query_bias, key_bias, self.value_bias])  # type: ignore[list-item]
        product = column_parallel_linear(x_nbd, weight, bias, self.parallel)
        length, batch = product.shape[:2]
        parts = product.split([query_weight.shape[0], key_weight.shape[0], self.value_weight.shape[0]], dim=-1)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (part.view(length, batch, count, -1) for part, count in zip(parts, heads))
        if projection is not None and not fold:
            q, k = project(q, projection), project(k, projection)
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def forward(self, x_nbd: torch.Tensor, rotary: RotaryTables | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over [N, B, D] (a slice of N under sequence parallelism): the same shape without the bias, and the bias [D]."""
        q_bhnd, k_bhnd, v_bhnd = self._query_key_value(x_nbd)
        if self.config.attention.qk_norm:
            q_bhnd, k_bhnd = self.query_norm(q_bhnd), self.key_norm(k_bhnd)
        if rotary is not None:
            q_bhnd, k_bhnd = apply_rotary(q_bhnd, *rotary), apply_rotary(k_bhnd, *rotary)
        dropout = self.config.model.attention_dropout if self.training else 0.0
        seed = self.noise.seed_for(f"layers.{self.index}.attention", split=True) if dropout else 0
        backend = self.config.attention.backend
        options: dict[str, Any] = {"scale": self.scale, "causal": True, "dropout": dropout, "seed": seed, "backend": backend}
        try:
            attended_bhnd = kernels.attention(q_bhnd, k_bhnd, v_bhnd, **options)
        except kernels.CannotServe as error:
            raise ConfigError(f"attention.backend: {error}; 'auto' picks one that can") from error
        return self.output(attended_bhnd.permute(2, 0, 1, 3).flatten(2))
