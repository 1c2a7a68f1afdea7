"""Loss and perplexities of a plain model, in float64 sums of fp32 log-likelihoods."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from spa_dist.export.model import PlainModel

IGNORED_TARGET = -100


@torch.inference_mode()
def total_loss(model: PlainModel, batches: Iterable[tuple[Any, Any]]) -> tuple[float, int]:
    """Sum of negative log-likelihoods, and how many targets it is over. batches: (inputs, targets) int64 [B, N] arrays."""
    device = model.embedding.weight.device
    total, count = 0.0, 0
    for inputs, targets in batches:
        logits = model(torch.as_tensor(inputs, device=device)).float()
        targets = torch.as_tensor(targets, device=device)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none")
        total += float(losses.double().sum())
        count += int((targets != IGNORED_TARGET).sum())
    return total, count


def perplexities(total: float, tokens: int, words: float) -> dict[str, float]:
    """Loss in nats per token; perplexity per token and per word of the text."""
    return {
        "loss": total / tokens,
        "token_perplexity": math.exp(min(700.0, total / tokens)),
        "word_perplexity": math.exp(min(700.0, total / words)) if words else math.nan,
        "tokens": tokens,
        "words": words,
    }
