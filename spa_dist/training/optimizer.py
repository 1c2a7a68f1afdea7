"""The optimizer: no weight decay on norms, biases and gates; learning rates of their own for W_Q and W_K, and for a mask's logits."""

import torch
from torch import nn

from spa_dist.attention import query_key_lr_scale
from spa_dist.config import Config


def decayed(parameter: nn.Parameter) -> bool:
    """Weight decay acts on matrices; norms, biases and gates are vectors, and a mask's logits say that they want none."""
    return parameter.dim() > 1 and not is_mask_logit(parameter)


def is_mask_logit(parameter: nn.Parameter) -> bool:
    """Whether a parameter is the logits of a mask's gates."""
    return getattr(parameter, "no_weight_decay", False)


def is_query_or_key(name: str) -> bool:
    """Whether a parameter is W_Q, W_K or the bias of one, of kind "spa" those before S."""
    return name.rpartition(".")[2] in ("query_weight", "query_bias", "key_weight", "key_bias")


def parameter_groups(
    model: nn.Module, weight_decay: float, *, query_key_scale: float = 1.0, logit_scale: float = 1.0
) -> list[dict]:
    """Groups of parameters that share weight decay and learning rate, in the order in which the model first has one of them.

    `lr_scale` of a group multiplies the learning rate: query_key_scale for W_Q, W_K and their biases, logit_scale for mask logits.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = logit_scale if is_mask_logit(parameter) else query_key_scale if is_query_or_key(name) else 1.0
            groups.setdefault((decayed(parameter), scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        for (decays, scale), parameters in groups.items()
    ]


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW or SGD of torch; the fused AdamW needs no compiler, on CPU and CUDA alike."""
    optimizer, attention = config.optimizer, config.attention
    assert config.model.head_dim and attention.d_proj
    groups = parameter_groups(
        model,
        optimizer.weight_decay,
        query_key_scale=query_key_lr_scale(attention.lr_scale, attention.kind, config.model.head_dim, attention.d_proj),
        logit_scale=attention.mask.lr_scale if attention.mask else 1.0,
    )
    if optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=optimizer.lr)
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)
