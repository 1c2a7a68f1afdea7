"""Floating-point operations of the model, from its shapes. A multiply-add counts as two.

Counted: every matrix product of the forward pass that a token causes, with queries and keys at the width they have after
folding, the output layer included; and the attention products over the keys that a causal mask leaves, (N + 1) / 2 on average.
Not counted: embedding look-ups, norms, softmax, forming W·S (independent of the number of tokens), recomputation, and what a
kernel does in vain. Training is three times the forward pass. MFU is this number over time and peak, so recomputation does
not raise it, and neither does S's sparsity.
"""

from spa_dist.attention import query_key_width
from spa_dist.config import Config


def forward_flops_per_token(config: Config) -> float:
    """Forward operations per position of a training sequence."""
    model = config.model
    assert model.num_kv_heads and model.head_dim and model.value_dim and model.ffn_hidden_size and model.vocab_size
    width = effective_width(config)
    query_key_value = model.num_heads * width + model.num_kv_heads * (width + model.value_dim)
    matrices = model.hidden_size * (query_key_value + model.num_heads * model.value_dim + 2 * model.ffn_hidden_size)
    keys = (model.sequence_length + 1) / 2
    attention = model.num_heads * (width + model.value_dim) * keys
    return 2.0 * (model.num_layers * (matrices + attention) + model.hidden_size * model.vocab_size)


def training_flops_per_token(config: Config) -> float:
    """Forward and backward operations per position of a training sequence."""
    return 3.0 * forward_flops_per_token(config)


def effective_width(config: Config) -> int:
    """d_qk, the width at which queries meet keys."""
    assert config.model.head_dim and config.attention.d_proj
    return query_key_width(config.attention.kind, config.model.head_dim, config.attention.d_proj)
