"""The exported model's config for transformers. An export in Hugging Face's format holds a copy of this file."""

from dataclasses import MISSING, fields
from typing import Any

from transformers import PretrainedConfig

from .model import PlainConfig

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32,
    "query_key_width": 32, "value_dim": 32, "ffn_hidden_size": 128, "sequence_length": 128, "positions": "rope",
    "rope_theta": 10000.0, "tie_embeddings": True, "norm": "layernorm", "norm_eps": 1e-5, "bias": True, "qk_norm": False,
    "logit_scale": 32**-0.5,
}  # fmt: skip
"""transformers makes configs without arguments, to save only what differs from them; these are for that and nothing else."""


class SPAConfig(PretrainedConfig):
    """`PlainConfig`'s fields under its names, and under transformers' own where those differ."""

    model_type = "spa"
    attribute_map = {  # noqa: RUF012  (transformers declares it so)
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "max_position_embeddings": "sequence_length",
        "intermediate_size": "ffn_hidden_size",
    }

    def __init__(self, **entries: Any) -> None:
        for field in fields(PlainConfig):
            default = _DEFAULTS[field.name] if field.default is MISSING else field.default
            setattr(self, field.name, entries.pop(field.name, default))
        entries.setdefault("eos_token_id", self.eos_id)
        entries["tie_word_embeddings"] = False  # the plain model has no second tensor to tie
        super().__init__(**entries)

    def plain(self) -> PlainConfig:
        """The same as a `PlainConfig`, checked. Raises ValueError."""
        return PlainConfig.from_dict({field.name: getattr(self, field.name) for field in fields(PlainConfig)})
