"""What generation keeps per token, from the model's shapes."""

from spa_dist.config import Config
from spa_dist.model.flops import effective_width

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def cache_bytes_per_token(config: Config) -> int:
    """Bytes of keys (d_k′ wide after the projection) and values (d_v) over all layers, at the run's precision."""
    model = config.model
    assert model.num_kv_heads and model.value_dim
    width = effective_width(config) + model.value_dim
    return model.num_layers * model.num_kv_heads * width * VALUE_BYTES[config.precision.dtype]
