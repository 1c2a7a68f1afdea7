"""Dropout masks as a pure function of (seed, step, layer, place, rank): nothing to save, and recomputation repeats them.

On a replicated activation every tensor-parallel rank draws the same mask; on a split one (heads, or positions under sequence
parallelism) each draws its own. Data-parallel ranks always differ.
"""

import hashlib

import torch


class Noise:
    """Seeds for the dropout of one process; the trainer sets `step` and `micro_batch` before each forward pass."""

    def __init__(self, seed: int, *, tensor_rank: int, data_rank: int):
        self.seed, self.tensor_rank, self.data_rank = seed, tensor_rank, data_rank
        self.step = 0
        """Optimizer step in progress, counted from 1; noise of gates follows it, the same for all micro-batches of a step."""
        self.micro_batch = 0
        """Index of the micro-batch since the start of the run, accumulation included."""

    def seed_for(self, place: str, *, split: bool) -> int:
        """A 63-bit seed for one dropout of one micro-batch.

        Args:
            place: names the layer and the dropout in it.
            split: the activation differs between tensor-parallel ranks.
        """
        rank = f"{self.data_rank}/{self.tensor_rank if split else 'all'}"
        digest = hashlib.blake2b(f"{self.seed}/{self.micro_batch}/{place}/{rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def seeded_dropout(x: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Zero each entry with `probability` and scale the rest by 1 / (1 − probability); the mask depends on seed and shape alone."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    keep = torch.empty_like(x, requires_grad=False).bernoulli_(1.0 - probability, generator=generator)
    return x * keep.div_(1.0 - probability)
