"""The names taken from megatron-core, and what it takes to run them on a machine without CUDA.

megatron-core 0.16 to 0.19 keep these names. Everything else in the project gets them from here.
"""

import warnings

import torch
import torch.distributed as dist

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
    "use_groups",
]


def run_without_cuda() -> None:
    """Let megatron-core's mappings and buffers allocate on the CPU: they ask for `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def use_groups(tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
    """Hand megatron-core its tensor- and data-parallel groups.

    Its own `initialize_model_parallel` makes some twenty groups, for pipelines, experts and contexts that there are none of;
    over gloo each keeps threads that wake a hundred times a second (measured: 3 % of a core per process, for nothing).
    """
    parallel_state.destroy_model_parallel()
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tensor
    parallel_state._DATA_PARALLEL_GROUP = data
    parallel_state._set_global_memory_buffer()
    assert parallel_state.get_tensor_model_parallel_group() is tensor
    assert parallel_state.get_tensor_model_parallel_world_size() == tensor.size()
