"""The forward pass written out a second time: float64, one sequence, one head and one query at a time."""

import math

import torch
from torch import Tensor

from spa_dist.config import Config


def reference_logits(config: Config, tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits [N, vocab_size], float64, from the full tensors of a checkpoint."""
    model = config.model
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    h = torch.stack([weights["embedding.weight"][token] for token in tokens])
    if model.positions == "learned":
        h = h + weights["positions.weight"][: len(tokens)]
    for index in range(model.num_layers):
        own = {n.removeprefix(f"layers.{index}."): t for n, t in weights.items() if n.startswith(f"layers.{index}.")}
        h = h + _attention(config, own, _norm(config, own, "norm1", h))
        hidden = _linear(own, "mlp.up", _norm(config, own, "norm2", h))
        h = h + _linear(own, "mlp.down", hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))))
    output = weights["embedding.weight" if model.tie_embeddings else "head.weight"][: model.vocab_size]
    return _norm(config, weights, "norm", h) @ output.T


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(config: Config, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.model.norm_eps).sqrt()
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))


def _attention(config: Config, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    model, attention = config.model, config.attention
    heads, groups, d_v = model.num_heads, model.num_kv_heads, model.value_dim
    all_q, all_k, all_v = (_linear(weights, f"attention.{part}", x) for part in ("query", "key", "value"))
    outputs = []
    for head in range(heads):
        group = head * groups // heads
        q, k = _head(config, weights, all_q, head, group, "query"), _head(config, weights, all_k, group, group, "key")
        d_k, d_qk = model.head_dim, q.shape[1]
        scale = 1 / math.sqrt(d_qk)
        if attention.kind == "spa" and attention.scale != "paper":
            scale = 1 / math.sqrt(d_k) if attention.scale == "unbiased" else attention.scale
        v = all_v[:, group * d_v : (group + 1) * d_v]
        rows = [torch.softmax(scale * (k[: i + 1] @ q[i]), 0) @ v[: i + 1] for i in range(len(x))]
        outputs.append(torch.stack(rows))
    return _linear(weights, "attention.output", torch.cat(outputs, dim=1))


def _head(config: Config, weights: dict[str, Tensor], x: Tensor, head: int, group: int, part: str) -> Tensor:
    width = config.attention.d_proj if config.attention.kind == "thin" else config.model.head_dim
    x = x[:, head * width : (head + 1) * width]
    if config.attention.kind == "spa":
        projection = weights["attention.projection"]
        x = x @ projection[group if len(projection) > 1 else 0]
    if config.attention.qk_norm:
        x = x / (x.square().mean(-1, keepdim=True) + config.model.norm_eps).sqrt()
        x = x * weights[f"attention.{part}_norm.weight"]
    if config.model.positions != "rope":
        return x
    half = x.shape[1] // 2
    turned = []
    for position, row in enumerate(x):
        # As complex numbers: (x_i, x_{i + d/2}) turns by position · theta^(-2i/d).
        angles = torch.tensor(
            [position * config.model.rope_theta ** (-2 * i / x.shape[1]) for i in range(half)], dtype=torch.float64
        )
        z = torch.complex(row[:half], row[half:]) * torch.polar(torch.ones(half, dtype=torch.float64), angles)
        turned.append(torch.cat([z.real, z.imag]))
    return torch.stack(turned)
