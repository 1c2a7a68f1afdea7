"""Fill in what is derived, so that a saved config says everything."""

from typing import Any

from spa_dist.config.batch import total_steps
from spa_dist.config.mask import MaskConfig
from spa_dist.config.schema import Config
from spa_dist.errors import ConfigError


def resolve(config: Config) -> Config:
    """The same config with no derivable field left empty (`model.vocab_size` waits for the dataset: `with_vocabulary`)."""
    model, attention = config.model, config.attention
    if model.head_dim is None and model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}: set model.head_dim"
        )
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    model = model.model_copy(
        update={
            "num_kv_heads": model.num_kv_heads or model.num_heads,
            "head_dim": head_dim,
            "value_dim": model.value_dim or head_dim,
            "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        }
    )
    gate = attention.pattern == "adaptive" and attention.kind == "spa" if attention.gate is None else attention.gate
    attention = attention.model_copy(
        update={"d_proj": attention.d_proj or max(1, head_dim // 2), "gate": gate, "mask": _mask(config)}
    )
    run = config.run.model_copy(update={"dir": config.run_dir})
    return config.model_copy(update={"run": run, "model": model, "attention": attention})


def _mask(config: Config) -> MaskConfig | None:
    """The mask section with the ends of its schedules filled in from the length of the run."""
    mask = config.attention.mask
    if mask is None:
        return None
    steps = total_steps(config)
    update: dict[str, Any] = {}
    if mask.magnitude is not None:
        last = mask.magnitude.last_step or max(1, mask.magnitude.first_step + 1, round(0.75 * steps))
        update["magnitude"] = mask.magnitude.model_copy(update={"last_step": last})
    if mask.gumbel is not None:
        last = mask.gumbel.last_step or max(1, mask.gumbel.first_step + 1, steps)
        update["gumbel"] = mask.gumbel.model_copy(update={"last_step": last})
    return mask.model_copy(update=update)


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """The config with the dataset's vocabulary; `ConfigError` when it asks for another one."""
    asked = config.model.vocab_size
    if asked is not None and asked != vocab_size:
        raise ConfigError(
            f"model.vocab_size={asked} but the tokenizer of data.path={config.data.path} has {vocab_size}: "
            "leave model.vocab_size out, or prepare the data with that vocabulary"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
