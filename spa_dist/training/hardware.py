"""What the machine is: device, peak speed, memory in use."""

import resource
import sys

import torch

from spa_dist.config import Config
from spa_dist.errors import ConfigError

PEAK_TFLOPS = {
    ("A100", "bf16"): 312.0,
    ("A100", "fp16"): 312.0,
    ("A100", "fp32"): 19.5,
    ("H100", "bf16"): 989.0,
    ("H100", "fp16"): 989.0,
    ("H100", "fp32"): 67.0,
    ("H200", "bf16"): 989.0,
    ("H200", "fp16"): 989.0,
    ("H200", "fp32"): 67.0,
}
"""Dense peak of one GPU by part of its name and number format (vendor's data sheets; no structured sparsity)."""


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device of this process. `ConfigError` when CUDA is asked for and absent, or there are fewer GPUs than processes."""
    asked = config.run.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device=cuda, but this machine has no CUDA device that torch can use: set run.device=cpu or auto"
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU: it has {torch.cuda.device_count()}; start at most as many processes"
        )
    return torch.device("cuda", local_rank)


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for (part, dtype), tflops in PEAK_TFLOPS.items():
        if part in name and dtype == config.precision.dtype:
            return tflops * 1e12
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has used: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
