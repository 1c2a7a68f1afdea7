"""The optimizer: no weight decay on norms, biases and gates; a learning rate of their own for the logits of a mask."""

import torch
from torch import nn

from spa_dist.config import Config


def decayed(parameter: nn.Parameter) -> bool:
    """Weight decay acts on matrices; norms, biases and gates are vectors, and a mask's logits say that they want none."""
    return parameter.dim() > 1 and not is_mask_logit(parameter)


def is_mask_logit(parameter: nn.Parameter) -> bool:
    """Whether a parameter is the logits of a mask's gates."""
    return getattr(parameter, "no_weight_decay", False)


def parameter_groups(model: nn.Module, weight_decay: float, lr_scale: float = 1.0) -> list[dict]:
    """Groups in the model's order: decayed, not decayed, and mask logits, whose learning rate is multiplied by `lr_scale`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = [p for p in parameters if is_mask_logit(p)]
    rest = [p for p in parameters if not is_mask_logit(p)]
    groups = [
        {"params": [p for p in rest if decayed(p)], "weight_decay": weight_decay, "lr_scale": 1.0},
        {"params": [p for p in rest if not decayed(p)], "weight_decay": 0.0, "lr_scale": 1.0},
        {"params": logits, "weight_decay": 0.0, "lr_scale": lr_scale},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW or SGD of torch; the fused AdamW needs no compiler, on CPU and CUDA alike."""
    optimizer, mask = config.optimizer, config.attention.mask
    groups = parameter_groups(model, optimizer.weight_decay, mask.lr_scale if mask else 1.0)
    if optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=optimizer.lr)
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)
