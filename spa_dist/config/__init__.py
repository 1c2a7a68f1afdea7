"""The run config: one typed tree (pydantic), one JSON file, every error names the key and the remedy."""

from spa_dist.config.batch import BatchPlan, plan_batches
from spa_dist.config.load import apply_override, config_from_dict, find_config, load_config
from spa_dist.config.resolve import with_vocabulary
from spa_dist.config.schema import AttentionConfig, Config, ModelConfig

__all__ = [
    "AttentionConfig",
    "BatchPlan",
    "Config",
    "ModelConfig",
    "apply_override",
    "config_from_dict",
    "find_config",
    "load_config",
    "plan_batches",
    "with_vocabulary",
]
