"""The tensor-parallel layers that the model is built from, on megatron-core's.

Activations are [N, B, D]: sequence, batch, features. Under Megatron sequence parallelism, outside attention and feed-forward
each tensor-parallel rank holds N / T positions.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spa_dist import kernels
from spa_dist.parallel.groups import tensor_group
from spa_dist.parallel.megatron import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_grad_accumulation_and_async_allreduce,
    scatter_to_sequence_parallel_region,
)

__all__ = [
    "ColumnLinear",
    "Embedding",
    "Norm",
    "RowLinear",
    "column_parallel_linear",
    "masked_cross_entropy",
    "scatter_to_sequence_parallel_region",
    "sum_gradient",
    "tensor_parallel_config",
]


def tensor_parallel_config(tensor_size: int, sequence_parallel: bool) -> ModelParallelConfig:
    """megatron-core's config for our layers; weights are initialised from the layout table, not by megatron-core."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_size,
        sequence_parallel=sequence_parallel and tensor_size > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float32,
    )


class _SumGradient(torch.autograd.Function):
    """Identity forward, all-reduce backward.

    megatron-core's `copy_to_tensor_model_parallel_region` reduces a copy when the gradient is not contiguous, and returns the
    partial one; the gradient of S, which a product transposes, is such a case.
    """

    @staticmethod
    def forward(ctx: Any, replicated: torch.Tensor) -> torch.Tensor:
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=tensor_group())
        return total


def sum_gradient(replicated: torch.Tensor) -> torch.Tensor:
    """The same tensor; its gradient is summed over the tensor-parallel group.

    For a replicated parameter of which each rank sees only a part of the uses: S and the query/key norms, since a rank has its
    own heads only, and norms and biases under sequence parallelism.
    """
    if tensor_group().size() == 1:
        return replicated
    return _SumGradient.apply(replicated)


def column_parallel_linear(
    x_nbd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: ModelParallelConfig
) -> torch.Tensor:
    """x W^T + b for a weight whose rows are this rank's; x is replicated, or a slice under sequence parallelism.

    Args:
        x_nbd: [N, B, D], or [N / T, B, D] under sequence parallelism.
        weight: [rows of this rank, D].

    Returns:
        [N, B, rows of this rank].
    """
    parallel = config.tensor_model_parallel_size > 1
    return linear_with_grad_accumulation_and_async_allreduce(
        input=x_nbd,
        weight=weight,
        bias=bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=parallel and not config.sequence_parallel,
        sequence_parallel=config.sequence_parallel,
        tp_group=tensor_group(),
    )


def _uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class ColumnLinear(ColumnParallelLinear):
    """[N, B, in] → [N, B, out / T], and the bias apart, for a kernel to add; the weight's rows are split."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, config: ModelParallelConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=_uninitialised,
            bias=bias,
            skip_bias_add=True,
            tp_group=tensor_group(),
        )

    def forward(self, x_nbd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, B, in] (a slice of N under sequence parallelism) → [N, B, out / T] without the bias, and the bias [out / T]."""
        return super().forward(x_nbd)


class RowLinear(RowParallelLinear):
    """[N, B, in / T] → [N, B, out], and the bias apart, for a kernel to add; the weight's columns are split."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, config: ModelParallelConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=_uninitialised,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tensor_group(),
        )

    def forward(self, x_nbd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, B, in / T] → [N, B, out] (a slice of N under sequence parallelism) without the bias, and the bias [out]."""
        output, bias = super().forward(x_nbd)
        return output, sum_gradient(bias) if bias is not None and self.sequence_parallel else bias


class Embedding(VocabParallelEmbedding):
    """Token embedding, and the output layer that shares its weight; one module, so that ZeRO-3 gathers the weight for both."""

    def __init__(self, num_embeddings: int, hidden_size: int, *, config: ModelParallelConfig):
        super().__init__(
            num_embeddings,
            hidden_size,
            init_method=_uninitialised,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tensor_group(),
        )
        self.config = config

    def forward(self, x: torch.Tensor, *, as_output: bool = False) -> torch.Tensor:
        """Tokens [B, N] → [N, B, D] (a slice of N under sequence parallelism); `as_output`: [N, B, D] → logits [N, B, V / T]."""
        if as_output:
            return column_parallel_linear(x, self.weight, None, self.config)
        embedded = super().forward(x)
        return embedded if self.reduce_scatter_embeddings else embedded.transpose(0, 1)


def masked_cross_entropy(
    logits_nbv: torch.Tensor, targets_nb: torch.Tensor, *, vocab_size: int, ignore: int
) -> torch.Tensor:
    """Sum over valid targets of the negative log-likelihood, in fp32, from logits split over the vocabulary.

    Args:
        logits_nbv: [N, B, V / T]; the padding of the vocabulary (entries past `vocab_size`) takes no part.
        targets_nb: [N, B] int64; entries equal to `ignore` count nothing.
    """
    group = tensor_group()
    width = logits_nbv.shape[-1]
    return kernels.cross_entropy(
        logits_nbv.reshape(-1, width),
        targets_nb.reshape(-1),
        ignore_index=ignore,
        first_class=group.rank() * width,
        num_classes=vocab_size,
        all_reduce=_all_reduce if group.size() > 1 else None,
    )


def _all_reduce(tensor: torch.Tensor, operation: str) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=tensor_group())


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, whose parameters are replicated."""

    def __init__(self, width: int, *, kind: str, eps: float, sum_gradients: bool):
        super().__init__()
        self.kind, self.eps, self.sum_gradients = kind, eps, sum_gradients
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width]; the parameters' gradients are summed over the tensor-parallel group where asked."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.sum_gradients:
            weight = sum_gradient(weight)
            bias = None if bias is None else sum_gradient(bias)
        if self.kind == "layernorm":
            return kernels.layer_norm(x, weight, bias, self.eps)
        return kernels.rms_norm(x, weight, self.eps)
