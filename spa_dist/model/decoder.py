"""A causal, pre-norm, tensor-parallel decoder."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spa_dist import kernels
from spa_dist.attention import rotary_tables
from spa_dist.config import Config
from spa_dist.model.attention import ParallelAttention, RotaryTables
from spa_dist.model.flops import effective_width
from spa_dist.model.noise import Noise, seeded_dropout
from spa_dist.parallel.layers import (
    ColumnLinear,
    Embedding,
    Norm,
    RowLinear,
    masked_cross_entropy,
    scatter_to_sequence_parallel_region,
)
from spa_dist.parallel.layout import padded_vocabulary
from spa_dist.parallel.megatron import ModelParallelConfig


class FeedForward(nn.Module):
    """down(gelu(up(x))), split over the hidden width."""

    def __init__(self, config: Config, parallel: ModelParallelConfig):
        super().__init__()
        model = config.model
        assert model.ffn_hidden_size
        self.up = ColumnLinear(model.hidden_size, model.ffn_hidden_size, bias=model.bias, config=parallel)
        self.down = RowLinear(model.ffn_hidden_size, model.hidden_size, bias=model.bias, config=parallel)

    def forward(self, x_nbd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, B, D] (a slice of N under sequence parallelism): the same shape without the last bias, and that bias [D]."""
        hidden, bias = self.up(x_nbd)
        return self.down(nn.functional.gelu(hidden) if bias is None else kernels.bias_gelu(hidden, bias))


class Block(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)), with dropout on each branch."""

    def __init__(self, config: Config, index: int, parallel: ModelParallelConfig, noise: Noise):
        super().__init__()
        model = config.model
        self.index, self.noise, self.dropout = index, noise, model.dropout
        self.split = parallel.sequence_parallel
        norm = {"kind": model.norm, "eps": model.norm_eps, "sum_gradients": self.split}
        self.norm1 = Norm(model.hidden_size, **norm)
        self.attention = ParallelAttention(config, index, parallel, noise)
        self.norm2 = Norm(model.hidden_size, **norm)
        self.mlp = FeedForward(config, parallel)

    def forward(self, x_nbd: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        """[N, B, D] → [N, B, D] (a slice of N under sequence parallelism)."""
        x_nbd = self._add(x_nbd, self.attention(self.norm1(x_nbd), rotary), "attention_output")
        return self._add(x_nbd, self.mlp(self.norm2(x_nbd)), "mlp_output")

    def _add(self, x_nbd: torch.Tensor, branch: tuple[torch.Tensor, torch.Tensor | None], place: str) -> torch.Tensor:
        branch_nbd, bias = branch
        dropout = self.dropout if self.training else 0.0
        seed = self.noise.seed_for(f"layers.{self.index}.{place}", split=self.split) if dropout else 0
        return kernels.bias_dropout_residual(branch_nbd, bias, x_nbd, dropout=dropout, seed=seed)


class Decoder(nn.Module):
    """Tokens to loss, or to this rank's part of the logits."""

    def __init__(self, config: Config, parallel: ModelParallelConfig, noise: Noise):
        super().__init__()
        model = config.model
        assert model.vocab_size is not None and model.head_dim and config.attention.d_proj
        rows = padded_vocabulary(model.vocab_size, model.vocab_multiple)
        self.config, self.parallel, self.noise = config, parallel, noise
        self.embedding = Embedding(rows, model.hidden_size, config=parallel)
        if model.positions == "learned":
            weight = torch.empty(model.sequence_length, model.hidden_size)
            self.positions = nn.Embedding(model.sequence_length, model.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(Block(config, index, parallel, noise) for index in range(model.num_layers))
        self.norm = Norm(model.hidden_size, kind=model.norm, eps=model.norm_eps, sum_gradients=parallel.sequence_parallel)
        self.head = None if model.tie_embeddings else Embedding(rows, model.hidden_size, config=parallel)

    def forward(self, tokens_bn: torch.Tensor, targets_bn: torch.Tensor | None = None, ignore: int = -100) -> torch.Tensor:
        """The sum over valid targets of the negative log-likelihood, or without targets the logits.

        Args:
            tokens_bn: [B, N] int64.
            targets_bn: [B, N] int64; entries equal to `ignore` count nothing.

        Returns:
            fp32 scalar, equal on every tensor-parallel rank; or logits [B, N, V / T] of this rank's part of the vocabulary.
        """
        x_nbd = self._embed(tokens_bn)
        rotary = self._rotary(tokens_bn.shape[1], x_nbd.device)
        for layer in self.layers:
            if self.config.parallel.activation_checkpointing and self.training:
                # Dropout is seeded by place and micro-batch, so there is no generator state to restore.
                x_nbd = checkpoint(layer, x_nbd, rotary, use_reentrant=False, preserve_rng_state=False)
            else:
                x_nbd = layer(x_nbd, rotary)
        logits_nbv = (self.head or self.embedding)(self.norm(x_nbd), as_output=True)
        if targets_bn is None:
            return logits_nbv.transpose(0, 1)
        vocab_size = self.config.model.vocab_size
        assert vocab_size is not None
        return masked_cross_entropy(logits_nbv, targets_bn.transpose(0, 1), vocab_size=vocab_size, ignore=ignore)

    def _embed(self, tokens_bn: torch.Tensor) -> torch.Tensor:
        x_nbd = self.embedding(tokens_bn)
        if self.config.model.positions == "learned":
            x_nbd = x_nbd + self._position_vectors(tokens_bn.shape[1])
        dropout = self.config.model.dropout
        if not self.training or dropout == 0.0:
            return x_nbd
        return seeded_dropout(x_nbd, dropout, self.noise.seed_for("embedding", split=self.parallel.sequence_parallel))

    def _position_vectors(self, length: int) -> torch.Tensor:
        """[N, 1, D], or this rank's slice of N under sequence parallelism."""
        vectors_n1d = self.positions(torch.arange(length, device=self.positions.weight.device)).unsqueeze(1)
        return scatter_to_sequence_parallel_region(vectors_n1d) if self.parallel.sequence_parallel else vectors_n1d

    def _rotary(self, length: int, device: torch.device) -> RotaryTables | None:
        """fp32 at every precision: an angle rounded to bf16 is a position moved."""
        model = self.config.model
        if model.positions != "rope":
            return None
        return rotary_tables(length, effective_width(self.config), model.rope_theta, device=device)
