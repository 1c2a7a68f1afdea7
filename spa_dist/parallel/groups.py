"""Process groups: world = tensor-parallel × data-parallel, tensor-parallel ranks next to each other."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from spa_dist.parallel.megatron import parallel_state, run_without_cuda, use_groups


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process; one process when nothing launched it."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def from_environment() -> "Launch":
        """Read RANK, LOCAL_RANK and WORLD_SIZE, as `deepspeed`, `torchrun` and Slurm's wrappers set them."""
        get = os.environ.get
        return Launch(int(get("RANK", "0")), int(get("LOCAL_RANK", "0")), int(get("WORLD_SIZE", "1")))


@dataclass(frozen=True)
class Grid:
    """This process's place: tensor-parallel and data-parallel rank and size, and its device."""

    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes logs and manifests."""
        return self.tensor_rank == 0 and self.data_rank == 0


def start_process_groups(launch: Launch, device: torch.device, tensor_size: int, timeout_minutes: float) -> Grid:
    """Join the world and split it; a collective that waits longer than the timeout raises.

    Without a launcher the world is this process alone, on a port of its own choosing.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        run_without_cuda()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    tensor, data = _split_world(tensor_size, timeout)
    use_groups(tensor, data)
    return Grid(tensor.rank(), tensor.size(), data.rank(), data.size(), device)


def _split_world(tensor_size: int, timeout: timedelta) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This process's tensor-parallel group (consecutive ranks) and data-parallel group (ranks `tensor_size` apart)."""
    world = dist.get_world_size()
    assert world % tensor_size == 0, (world, tensor_size)
    tensor_groups = [list(range(first, first + tensor_size)) for first in range(0, world, tensor_size)]
    data_groups = [list(range(first, world, tensor_size)) for first in range(tensor_size)]
    tensor, _ = dist.new_subgroups_by_enumeration(tensor_groups, timeout=timeout)
    data, _ = dist.new_subgroups_by_enumeration(data_groups, timeout=timeout)
    assert tensor is not None and data is not None
    return tensor, data


def stop_process_groups() -> None:
    """Leave the world. Never called on the way out of an error: a collective would wait for ranks that are gone."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_group() -> dist.ProcessGroup:
    """The tensor-parallel group of this process."""
    return parallel_state.get_tensor_model_parallel_group()


def data_group() -> dist.ProcessGroup:
    """The data-parallel group of this process."""
    return parallel_state.get_data_parallel_group()
