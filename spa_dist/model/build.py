"""From a config to an initialised model, the same one at every tensor-parallel size."""

import torch

from spa_dist.attention import make_projection
from spa_dist.config import Config
from spa_dist.config.rules import PATTERN_OPTIONS
from spa_dist.model.decoder import Decoder
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
        return initial_projection(config, name) if name.endswith("attention.projection") else None

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
        if pattern == attention.pattern and getattr(attention, option) is not None
    }
    return make_projection(
        attention.pattern,
        model.head_dim,
        attention.d_proj,
        num_heads=model.num_kv_heads if projection_is_per_head(config) else 1,
        sparsity=attention.sparsity,
        seed=parameter_seed(config.run.seed, name),
        **options,
    )
