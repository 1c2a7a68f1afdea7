"""Noise of the gates: a pure function of (seed, name, step), the same on every rank and again in a recomputation."""

import hashlib

import torch
from torch import Tensor

_HALF_ULP = 2.0**-25


def uniform_noise(seed: int, name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """Uniform fp32 on the CPU, strictly inside (0, 1)."""
    digest = hashlib.sha256(f"spa_dist gates {seed} {name} {step}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(shape, generator=generator).clamp_(min=_HALF_ULP, max=1 - 2.0**-24)
