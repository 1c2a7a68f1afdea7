"""What a run would do, from its config alone: sizes, batches, memory per rank. For `--dry-run`."""

import math
from dataclasses import dataclass

from spa_dist.config import BatchPlan, Config
from spa_dist.model.flops import effective_width, training_flops_per_token
from spa_dist.parallel.layout import parameter_layout

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the fullest moment of a step; the largest rank where they differ."""

    weights: int
    gradients: int
    optimizer: int
    """fp32 master weights and Adam's two moments."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the parts; allocator and library workspace come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def parameter_counts(config: Config) -> tuple[int, int]:
    """(trained parameters of the whole model, those of one tensor-parallel rank)."""
    total = local = 0
    for entry in parameter_layout(config).values():
        if not entry.buffer:
            total += math.prod(entry.shape)
            local += math.prod(entry.local_shape(config.parallel.tensor))
    return total, local


def estimate_memory(config: Config, plan: BatchPlan) -> MemoryEstimate:
    """From shapes. ZeRO 1 spreads the optimizer state over data-parallel ranks, 2 also the gradients, 3 also the weights.

    Activations are what the backward pass keeps (the fused attention keeps q, k, v, output and a log-sum-exp, no N × N scores);
    with recomputation one block's, and each block's input.
    """
    _, local = parameter_counts(config)
    spread = plan.data_parallel_size
    stage = config.zero_stage
    size = DTYPE_BYTES[config.precision.dtype]
    gradient_size = 4 if config.precision.dtype == "bf16" and stage > 0 else size
    masters = 4 if size == 2 or stage > 0 else 0
    moments = 8 if config.optimizer.name == "adamw" else 0
    optimizer = local * (masters + moments)
    tokens = plan.micro_size * config.model.sequence_length
    per_token = _block_values_per_token(config) * size
    boundary = config.model.hidden_size * size // (config.parallel.tensor if config.parallel.sequence else 1)
    layers = config.model.num_layers
    recompute = config.parallel.activation_checkpointing
    activations = tokens * (per_token + layers * boundary if recompute else layers * per_token)
    rows = next(iter(parameter_layout(config).values())).local_shape(config.parallel.tensor)[0]
    return MemoryEstimate(
        weights=local * size // (spread if stage == 3 else 1),
        gradients=local * gradient_size // (spread if stage >= 2 else 1),
        optimizer=optimizer // (spread if stage >= 1 else 1),
        activations=activations,
        logits=tokens * rows * (size + 8),
    )


def _block_values_per_token(config: Config) -> int:
    """Values per token that one block keeps for the backward pass, on one tensor-parallel rank."""
    model, tensor = config.model, config.parallel.tensor
    assert model.num_kv_heads and model.value_dim and model.ffn_hidden_size
    width = effective_width(config)
    heads = (model.num_heads * (width + model.value_dim) + model.num_kv_heads * (width + model.value_dim)) // tensor
    rotated = (model.num_heads + model.num_kv_heads) * width // tensor if model.positions == "rope" else 0
    feed_forward = 2 * model.ffn_hidden_size // tensor
    norms = 4 * model.hidden_size // (tensor if config.parallel.sequence else 1)
    return heads + rotated + feed_forward + norms


def describe(config: Config, plan: BatchPlan, device: str, data: str, batch: str) -> str:
    """The plan as a person reads it."""
    total, local = parameter_counts(config)
    memory = estimate_memory(config, plan)
    model, attention = config.model, config.attention
    world = plan.data_parallel_size * config.parallel.tensor
    flops = training_flops_per_token(config)
    kind = attention.kind if attention.kind != "spa" else f"spa ({_projection(config)})"
    tokens = plan.steps * plan.tokens_per_step
    rows = [
        ("run", f"{config.run.name} → {config.run_dir}"),
        ("processes", f"{world} on {device}: tensor {config.parallel.tensor} × data {plan.data_parallel_size}"),
        ("engine", f"DeepSpeed ZeRO {config.zero_stage}, {config.precision.dtype}, {_extras(config)}"),
        ("model", f"{model.num_layers} layers × {model.hidden_size}, {model.num_heads} heads, vocabulary {model.vocab_size:,}"),
        ("attention", f"{kind}: d_k {model.head_dim} → d_qk {effective_width(config)}, d_v {model.value_dim}"),
        ("parameters", f"{total:,} ({local:,} on a rank)"),
        ("data", data),
        ("batch", f"{plan.global_size} sequences = {plan.micro_size} micro × {plan.data_parallel_size} data × "
                  f"{plan.accumulation_steps} accumulation; {plan.tokens_per_step:,} tokens per step"),
        ("mock batch", batch),
        ("length", f"{plan.steps:,} steps, {tokens:,} tokens, {flops * tokens:.3g} FLOPs ({flops:.3g} per token)"),
        ("memory/rank", _memory(memory)),
    ]  # fmt: skip
    return "\n".join(f"{name:12} {text}" for name, text in rows)


def _projection(config: Config) -> str:
    attention, mask = config.attention, config.attention.mask
    if not attention.learns_mask or mask is None:
        return f"{attention.pattern}, sparsity {attention.sparsity}"
    start = f"{attention.pattern} by {mask.method} from {mask.start}"
    if mask.method == "magnitude" and mask.magnitude:
        return f"{start}, sparsity {attention.sparsity} at step {mask.magnitude.last_step}"
    return f"{start}, λ {mask.l0_lambda:g}" if mask.method in ("gumbel", "l0") else start


def _extras(config: Config) -> str:
    parallel = config.parallel
    parts = [f"{config.optimizer.name} lr {config.optimizer.lr:g}, {config.schedule.name}"]
    parts += ["sequence parallel"] if parallel.sequence and parallel.tensor > 1 else []
    parts += ["recomputation"] if parallel.activation_checkpointing else []
    return ", ".join(parts)


def _memory(memory: MemoryEstimate) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    inner = ", ".join(f"{part} {getattr(memory, part) / GIB:.2f}" for part in parts)
    return f"{memory.total / GIB:.2f} GiB estimated ({inner}), allocator and workspace on top"
