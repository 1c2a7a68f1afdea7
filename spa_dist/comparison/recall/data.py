"""Sequences of key–value pairs, then questions: `k₁ v₁ k₂ v₂ … k_P v_P | q₁ … q_P`, where the answer to q is the value beside it.

The keys of a sequence are P different ones of 1,024, the values are drawn from 64 with replacement, and every key is asked once, in an
order of its own (multi-query associative recall; Arora et al., 2023).
"""

import torch
from torch import Generator, Tensor

KEYS = 1024
VALUES = 64
VOCABULARY = KEYS + VALUES
"""Tokens 0 … 1023 are keys, the rest are values."""


def recall_batch(sequences: int, pairs: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a batch: context [sequences, 2·pairs], questions [sequences, pairs] and answers [sequences, pairs], int64.

    context and questions are tokens, answers are values 0 … 63. Raises ValueError for more pairs than keys.
    """
    if not 1 <= pairs <= KEYS:
        raise ValueError(f"a sequence holds 1 to {KEYS} pairs, one for each key, not {pairs}")
    keys = torch.rand(sequences, KEYS, generator=generator).topk(pairs, dim=-1).indices
    values = torch.randint(VALUES, (sequences, pairs), generator=generator)
    context = torch.stack([keys, values + KEYS], dim=-1).flatten(1)
    order = torch.rand(sequences, pairs, generator=generator).argsort(dim=-1)
    return context, keys.gather(1, order), values.gather(1, order)
