"""The model-parallel unit that DeepSpeed asks for group facts.

Every name that DeepSpeed 0.19 calls on an `mpu` is here and nothing more: DeepSpeed turns an AttributeError into a world of
one, and takes an object with `initialize_sequence_parallel` for its own Ulysses.
"""

import torch.distributed as dist

from spa_dist.parallel.groups import data_group, tensor_group


class ModelParallelUnit:
    """Group facts for `deepspeed.initialize(mpu=…)`: the model-parallel group is the tensor-parallel group."""

    def get_model_parallel_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return tensor_group().rank()

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return tensor_group().size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return tensor_group()

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first member of the tensor-parallel group."""
        return dist.get_process_group_ranks(tensor_group())[0]

    def get_pipeline_model_parallel_rank(self) -> int:
        """Always 0: there is no pipeline parallelism."""
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Always 1: there is no pipeline parallelism."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """Rank in the data-parallel group."""
        return data_group().rank()

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group."""
        return data_group().size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The data-parallel group."""
        return data_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return dist.get_process_group_ranks(data_group())
