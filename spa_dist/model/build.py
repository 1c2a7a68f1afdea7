"""From a config to an initialised model, the same one at every tensor-parallel size."""

import torch

from spa_dist.attention import make_projection
from spa_dist.config import Config
from spa_dist.config.rules import PATTERN_OPTIONS
from spa_dist.errors import ConfigError
from spa_dist.model.decoder import Decoder
from spa_dist.model.masks import mask_method
from spa_dist.model.noise import Noise
from spa_dist.parallel.groups import Grid
from spa_dist.parallel.layers import tensor_parallel_config
from spa_dist.parallel.layout import initialise, parameter_layout, parameter_seed, projection_is_per_head


def build_model(config: Config, grid: Grid) -> Decoder:
    """This rank's part of the model, in fp32 on the CPU; weights and S are functions of `run.seed` alone."""
    noise = Noise(config.run.seed, tensor_rank=grid.tensor_rank, data_rank=grid.data_rank)
    parallel = tensor_parallel_config(grid.tensor_size, config.parallel.sequence)
    model = Decoder(config, parallel, noise)

    def special(name: str) -> torch.Tensor | None:
        prefix, found, suffix = name.partition("attention.projection")
        if not found:
            return None
        projection = initial_projection(config, f"{prefix}attention.projection")
        method = mask_method(config)
        return projection if method is None else method.initial(projection)[suffix.removeprefix(".")]

    initialise(
        model,
        parameter_layout(config),
        seed=config.run.seed,
        tensor_rank=grid.tensor_rank,
        tensor_size=grid.tensor_size,
        special=special,
    )
    return model


def initial_projection(config: Config, name: str) -> torch.Tensor:
    """S as its layer starts with: [1 or key/value heads, d_k, d_k′], a function of `run.seed` and the parameter's name."""
    model, attention = config.model, config.attention
    assert model.num_kv_heads and model.head_dim and attention.d_proj
    options = {
        option: getattr(attention, option)
        for option, pattern in PATTERN_OPTIONS.items()
        if pattern == attention.drawn_pattern and getattr(attention, option) is not None
    }
    return make_projection(
        attention.drawn_pattern,
        model.head_dim,
        attention.d_proj,
        num_heads=model.num_kv_heads if projection_is_per_head(config) else 1,
        sparsity=attention.mask.start_sparsity if attention.learns_mask and attention.mask else attention.sparsity,
        seed=parameter_seed(config.run.seed, name),
        **options,
    )


def initial_sparsity(config: Config) -> float:
    """Share of zeros that a learned S really starts with; 0 where none is learned."""
    if not config.attention.learns_mask:
        return 0.0
    return float((initial_projection(config, "layers.0.attention.projection") == 0).double().mean())


def check_start(config: Config) -> None:
    """Raise `ConfigError` when pruning would start below the density where it is to end."""
    mask, start = config.attention.mask, initial_sparsity(config)
    if not config.attention.learns_mask or mask is None or mask.magnitude is None or mask.magnitude.regrow > 0:
        return
    if mask.method == "magnitude" and start > config.attention.sparsity:
        raise ConfigError(
            f"attention.mask.start={mask.start!r} has {start:.1%} zeros, more than attention.sparsity="
            f"{config.attention.sparsity:g}, where pruning ends: raise attention.sparsity, lower attention.mask.start_sparsity, "
            "or set attention.mask.magnitude.regrow"
        )
