"""Cross-field rules that the config alone can decide, and warnings for options that have no effect."""

import logging
from collections.abc import Iterator

from spa_dist.config.mask_rules import idle_mask_options, mask_rules
from spa_dist.config.schema import Config
from spa_dist.errors import ConfigError

logger = logging.getLogger(__name__)

PATTERN_OPTIONS = {"block": "block", "bandwidth": "banded", "levels": "hierarchical", "kernel_size": "conv"}
"""Option of the attention section → the one pattern that reads it."""


def check_config(config: Config) -> None:
    """Raise `ConfigError` for the first broken rule of a resolved config; warn of options without effect."""
    for message in broken_rules(config):
        raise ConfigError(message)
    for message in idle_options(config):
        logger.warning(message)


def broken_rules(config: Config) -> Iterator[str]:
    """One line for each rule that the config breaks."""
    run, optimizer = config.run, config.optimizer
    if (run.steps is None) == (run.tokens is None):
        yield "give run.steps or run.tokens, one of them: they say how long the run is"
    if not all(0.0 <= beta < 1.0 for beta in optimizer.betas):
        yield f"optimizer.betas={list(optimizer.betas)}: each must be in [0, 1)"
    yield from _attention_rules(config)
    yield from _parallel_rules(config)


def _attention_rules(config: Config) -> Iterator[str]:
    model, attention = config.model, config.attention
    assert model.num_kv_heads and model.head_dim and attention.d_proj
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={model.num_kv_heads}"
    if attention.kind != "dense" and attention.d_proj > model.head_dim:
        yield (
            f"attention.d_proj={attention.d_proj} is larger than model.head_dim={model.head_dim}: the projection narrows queries "
            f"and keys; use at most {model.head_dim}"
        )
    width = model.head_dim if attention.kind == "dense" else attention.d_proj
    if model.positions == "rope" and width % 2:
        where = "model.head_dim" if attention.kind == "dense" else "attention.d_proj"
        yield f"{where}={width} is odd, and model.positions=rope turns pairs of features: use an even width"
    if isinstance(attention.scale, float | int) and attention.scale <= 0:
        yield f"attention.scale={attention.scale} must be above 0, or 'paper' or 'unbiased'"
    if attention.lr_scale != "matched" and not attention.lr_scale > 0:
        yield f"attention.lr_scale={attention.lr_scale} must be above 0, or 'matched'"
    if attention.block is not None and min(attention.block) < 1:
        yield f"attention.block={list(attention.block)}: rows and columns of a block are at least 1"
    if attention.gate and attention.qk_norm:
        yield (
            "attention.gate (pattern 'adaptive' has it) cannot be had with attention.qk_norm: normalised queries forget a factor, "
            "and the norm's weight is a temperature already; turn one of them off"
        )
    yield from mask_rules(config)


def _parallel_rules(config: Config) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor
    assert model.num_kv_heads and model.ffn_hidden_size
    if parallel.pipeline != 1:
        yield (
            f"parallel.pipeline={parallel.pipeline}: pipeline parallelism is not supported; use parallel.tensor, and ZeRO stage 3 "
            "(deepspeed.zero_optimization.stage) for models that do not fit"
        )
    for key, value in (
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.num_kv_heads),
        ("ffn_hidden_size", model.ffn_hidden_size),
    ):
        if value % tensor:
            yield f"model.{key}={value} is not divisible by parallel.tensor={tensor}"
    if model.vocab_multiple % tensor:
        yield f"model.vocab_multiple={model.vocab_multiple} is not divisible by parallel.tensor={tensor}"
    if parallel.sequence and model.sequence_length % tensor:
        yield (
            f"model.sequence_length={model.sequence_length} is not divisible by parallel.tensor={tensor}, "
            "which parallel.sequence needs"
        )


def idle_options(config: Config) -> Iterator[str]:
    """One line for each option that was set and does nothing in this run."""
    attention = config.attention
    yield from idle_mask_options(config)
    for option, pattern in PATTERN_OPTIONS.items():
        idle = attention.kind != "spa" or attention.drawn_pattern != pattern
        if idle and getattr(attention, option) is not None:
            yield f"attention.{option} has no effect: only pattern {pattern!r} of kind 'spa' reads it"
    if attention.kind != "spa":
        for option in ("pattern", "sparsity", "scale", "per", "trainable"):
            if (
                option in attention.model_fields_set
                and getattr(attention, option) != type(attention).model_fields[option].default
            ):
                yield f"attention.{option} has no effect: attention.kind is {attention.kind!r}"
    if attention.kind != "spa" and attention.lr_scale == "matched":
        yield f"attention.lr_scale='matched' has no effect: attention.kind is {attention.kind!r}"
    if config.parallel.sequence and config.parallel.tensor == 1:
        yield "parallel.sequence has no effect: parallel.tensor is 1"
    if (
        config.schedule.name == "constant"
        and config.schedule.warmup_steps
        and "warmup_steps" in config.schedule.model_fields_set
    ):
        yield "schedule.warmup_steps has no effect: schedule.name is 'constant'"
