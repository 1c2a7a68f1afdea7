"""The optimizer, with no weight decay on norms and biases."""

import torch
from torch import nn

from spa_dist.config.schema import OptimizerConfig


def decayed(parameter: nn.Parameter) -> bool:
    """Weight decay acts on matrices; norms and biases are vectors."""
    return parameter.dim() > 1


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups, decayed and not, each in the model's order."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if decayed(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decayed(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD of torch; the fused AdamW needs no compiler, on CPU and CUDA alike."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
