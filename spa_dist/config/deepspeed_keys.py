"""Check the `deepspeed` section: DeepSpeed itself ignores a misspelt key at its top level, so it is found here.

The tables hold the keys of DeepSpeed 0.19; a test compares them with the installed package.
"""

import difflib
from typing import Any

from spa_dist.errors import ConfigError

OWNED = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size and batch.micro_size",
    "managed_gradient_accumulation": "batch.global_size and batch.micro_size",
    "gradient_clipping": "optimizer.clip_norm",
    "optimizer": "optimizer.*",
    "scheduler": "schedule.*",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "torch_autocast": "precision.dtype",
    "amp": "precision.dtype",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "tensorboard": "logging.tensorboard",
    "steps_per_print": "logging.every",
}
"""DeepSpeed's key → the key of this config that says it."""

TOP_LEVEL = (
    "aio", "autotuning", "bf16", "checkpoint", "comms_logger", "communication_data_type", "compile", "compression_training",
    "csv_monitor", "comet", "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "disable_allgather",
    "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "flops_profiler", "fp16", "gradient_allreduce_op",
    "gradient_predivide_factor", "log_level", "memory_breakdown", "prescale_gradients", "seq_parallel_communication_data_type",
    "sparse_gradients", "timers", "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip

NESTED = {
    "zero_optimization": (
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
        "offload_param", "offload_optimizer", "sub_group_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size",
        "stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
        "model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance",
        "max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold", "module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "allgather_sequential", "ignore_unused_parameters",
        "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear", "log_trace_cache_warnings",
        "enable_sanity_checks",
    ),
    "zero_optimization.offload_optimizer": (
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
    ),
    "zero_optimization.offload_param": ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    "fp16": ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
    "bf16": ("immediate_grad_update", "check_grad_overflow"),
    "data_types": ("grad_accum_dtype",),
}  # fmt: skip

_SWITCHES = {"fp16.enabled": "precision.dtype=fp16", "bf16.enabled": "precision.dtype=bf16"}


def check_deepspeed_section(section: dict[str, Any]) -> None:
    """Refuse misspelt keys, keys that this config owns, and values that mean something else than they say.

    Raises:
        ConfigError: one line with the dotted key.
    """
    for key in section:
        if key in OWNED:
            raise ConfigError(f"deepspeed.{key} is set by {OWNED[key]}: say it there")
        if key not in TOP_LEVEL:
            raise ConfigError(f"unknown key deepspeed.{key}{_hint(key, TOP_LEVEL, 'deepspeed.')}")
    _refuse_auto(section, "deepspeed")
    for dotted, known in NESTED.items():
        _check_nested(section, dotted, known)
    stage = section.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"deepspeed.zero_optimization.stage: {stage!r} is not one of 0, 1, 2, 3")


def _check_nested(section: dict[str, Any], dotted: str, known: tuple[str, ...]) -> None:
    node: Any = section
    for part in dotted.split("."):
        node = node.get(part)
        if node is None:
            return
        if not isinstance(node, dict):
            raise ConfigError(f"deepspeed.{dotted} must be an object, not {node!r}")
    for key in node:
        full = f"{dotted}.{key}"
        if full in _SWITCHES:
            raise ConfigError(f"deepspeed.{full} is set by precision.dtype: say {_SWITCHES[full]}")
        if key not in known:
            raise ConfigError(f"unknown key deepspeed.{full}{_hint(key, known, f'deepspeed.{dotted}.')}")


def _refuse_auto(node: Any, dotted: str) -> None:
    if node == "auto":
        raise ConfigError(f"{dotted}: 'auto' silently means DeepSpeed's default; write the value, or leave the key out")
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_auto(value, f"{dotted}.{key}")


def _hint(key: str, known: tuple[str, ...], prefix: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; {prefix.rstrip('.')} has {', '.join(known)}"
