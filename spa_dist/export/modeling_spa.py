"""The exported model for transformers. An export in Hugging Face's format holds a copy of this file and of `model.py`.

AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_spa import SPAConfig
from .model import PlainModel

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # renamed in version 5


class SPAForCausalLM(PreTrainedModel, GenerationMixin):
    """`PlainModel` behind transformers' interface; keys and values go into its DynamicCache, d_qk and d_v wide."""

    config_class = SPAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True  # it is what the plain model calls

    def __init__(self, config: SPAConfig) -> None:
        super().__init__(config)
        self.model = PlainModel(config.plain())
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a file; there is no recipe for making new ones here."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> Any:
        """transformers' interface of a causal language model.

        input_ids [B, N], those after the cached ones; attention_mask [B, M], 0 for padding on either side; labels [B, N],
        −100 where no loss is wanted. past_key_values is the older name of `cache`.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be [batch, tokens]: use the dynamic cache, which needs no other")
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        last = logits_to_keep == 1 and labels is None
        logits = self.model(input_ids, mask=mask, positions=position_ids, cache=cache, last_only=last)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        entries = {"loss": loss, "logits": logits[:, -logits_to_keep:], _CACHE: cache if use_cache else None}
        output = CausalLMOutputWithPast(**entries)
        return output.to_tuple() if return_dict is False else output
