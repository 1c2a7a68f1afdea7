"""Next-token prediction: its loss and its perplexities."""

import math
from collections.abc import Callable

import torch

IGNORED_TARGET = -100


class LanguageModelling:
    """The loss is the sum of negative log-likelihoods over valid targets; whoever calls divides by their global number."""

    @staticmethod
    def loss(forward: Callable[..., torch.Tensor], inputs_bn: torch.Tensor, targets_bn: torch.Tensor) -> torch.Tensor:
        """Sum over valid targets, fp32 scalar. inputs, targets: [B, N] int64; target -100 counts nothing."""
        return forward(inputs_bn, targets_bn, ignore=IGNORED_TARGET)

    @staticmethod
    def valid_targets(targets_bn: torch.Tensor) -> int:
        """How many targets count."""
        return int((targets_bn != IGNORED_TARGET).sum())

    @staticmethod
    def metrics(loss_sum: float, tokens: int, words: float) -> dict[str, float]:
        """Mean loss in nats per token, perplexity per token, and per word of the text: exp(total / words), whatever the tokenizer."""
        return {
            "loss": loss_sum / tokens,
            "token_perplexity": _exp(loss_sum / tokens),
            "word_perplexity": _exp(loss_sum / words) if words else math.nan,
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
