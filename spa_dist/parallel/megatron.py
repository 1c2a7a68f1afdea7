"""The names taken from megatron-core, and what it takes to run them on a machine without CUDA.

megatron-core 0.16 to 0.19 keep these names. Everything else in the project gets them from here.
"""

import warnings

import torch

with warnings.catch_warnings():
    # Importing megatron.core says four times that Transformer Engine and Apex are absent; neither is used here.
    warnings.simplefilter("ignore")
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        linear_with_grad_accumulation_and_async_allreduce,
        scatter_to_sequence_parallel_region,
        vocab_parallel_cross_entropy,
    )

__all__ = [
    "ColumnParallelLinear",
    "ModelParallelConfig",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "linear_with_grad_accumulation_and_async_allreduce",
    "parallel_state",
    "run_without_cuda",
    "scatter_to_sequence_parallel_region",
    "vocab_parallel_cross_entropy",
]


def run_without_cuda() -> None:
    """Let megatron-core's mappings and buffers allocate on the CPU: they ask for `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
