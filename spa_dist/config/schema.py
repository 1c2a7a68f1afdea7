"""The run config: one typed tree, one JSON file.

Every field says what it is, its unit, and why its default is what it is. `None` means "derived": `spa_dist.config.resolve`
fills it in, and the resolved config is what a run saves. Cross-field rules live in `rules.py`.
"""

from typing import Any, Literal

from pydantic import Field

from spa_dist.config.mask import MaskConfig
from spa_dist.config.section import Section


class RunConfig(Section):
    """What is run, for how long, and where its files go."""

    name: str = "spa"
    dir: str | None = None
    """Folder of the run's files; default `runs/<name>`."""
    seed: int = Field(1234, ge=0)
    """Everything random is a function of this seed: weights, S, dropout, data order."""
    steps: int | None = Field(None, gt=0)
    """Optimizer steps; give this or `tokens`."""
    tokens: int | None = Field(None, gt=0)
    """Training length in tokens, rounded up to whole steps; give this or `steps`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class TaskConfig(Section):
    """What is learned."""

    name: Literal["language_modelling"] = "language_modelling"


class ModelConfig(Section):
    """A pre-norm decoder. Widths are per head unless they say otherwise."""

    num_layers: int = Field(12, gt=0)
    hidden_size: int = Field(512, gt=0)
    num_heads: int = Field(8, gt=0)
    num_kv_heads: int | None = Field(None, gt=0)
    """Key/value heads; default `num_heads`. Fewer is grouped-query attention."""
    head_dim: int | None = Field(None, gt=0)
    """d_k, the query/key width before the projection; default hidden_size / num_heads."""
    value_dim: int | None = Field(None, gt=0)
    """d_v, the value width; default `head_dim`."""
    ffn_hidden_size: int | None = Field(None, gt=0)
    """Width of the feed-forward layer; default 4 · hidden_size."""
    sequence_length: int = Field(512, gt=0)
    """Tokens per training sequence, N."""
    vocab_size: int | None = Field(None, gt=0)
    """Default: what the dataset's tokenizer has. If given, it must agree with it."""
    vocab_multiple: int = Field(128, gt=0)
    """The embedding has its rows padded to a multiple of this, the same at each tensor-parallel size. Padding takes no part in the loss."""
    positions: Literal["rope", "learned", "none"] = "rope"
    rope_theta: float = Field(10000.0, gt=0)
    tie_embeddings: bool = True
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(1e-5, gt=0)
    bias: bool = True
    """Biases on the linear layers."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """On the embedding and on each block's output."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """On the attention probabilities."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the weights; output projections of a block are divided by √(2·num_layers)."""


class AttentionConfig(Section):
    """Which attention, and for SPA which projection S (d_k × d_k′)."""

    kind: Literal["spa", "dense", "thin"] = "spa"
    """`thin` is the control: no S, queries and keys born d_k′ wide."""
    pattern: Literal[
        "random", "block", "banded", "hierarchical", "conv", "head_specific", "gaussian", "learned", "adaptive"
    ] = "random"
    """A fixed S, or a `learned` one, whose mask is trained as `attention.mask` says; `adaptive` is learned, with `gate`."""
    d_proj: int | None = Field(None, gt=0)
    """d_k′; default head_dim / 2."""
    sparsity: float = Field(0.8, ge=0.0, lt=1.0)
    """Share of zeros in S, or where pruning of a learned S ends. The paper's sparsity s is 1 / (1 − sparsity)."""
    scale: Literal["paper", "unbiased"] | float = "paper"
    """Factor on the scores: 1/√d_k′ (`paper`), 1/√d_k (`unbiased`: ⟨qS, kS⟩ estimates ⟨q, k⟩), or a number."""
    lr_scale: Literal["matched"] | float = 1.0
    """Learning rate of W_Q and W_K as a multiple of the model's. A step of W_Q moves W_Q·S about d_k/d_k′ times as far as it moves a W_Q
    born d_k′ wide: `matched` is d_k′/d_k for SPA, 1 for other kinds."""
    per: Literal["layer", "head"] = "layer"
    """One S per layer, shared by its heads, or one per (key/value) head."""
    trainable: bool = False
    """Train the non-zero entries of a fixed pattern."""
    gate: bool | None = None
    """A learned temperature exp(g) on the logits of each head, 1 at the start; default: true for pattern `adaptive` alone."""
    mask: MaskConfig | None = None
    """How a learned S is trained."""
    fold: bool = True
    """Multiply S into W_Q and W_K once per step instead of into every query and key. Exact either way."""
    qk_norm: bool = False
    """RMS-normalise queries and keys after the projection."""
    backend: Literal["auto", "triton", "cudnn", "flex", "tiled", "sdpa", "reference"] = "auto"
    """How attention is computed: `auto` picks by device, dtype and shape, and the log says once what and why; a named one that
    cannot serve ends the run and says why. `flex` has no backward on CPU."""
    block: tuple[int, int] | None = Field(None, strict=False)
    """Pattern `block`: rows and columns of one block; default 8 × 8."""
    bandwidth: int | None = Field(None, gt=0)
    """Pattern `banded`: width of the band in columns; default 16."""
    levels: int | None = Field(None, gt=0)
    """Pattern `hierarchical`: number of resolutions."""
    kernel_size: int | None = Field(None, gt=0)
    """Pattern `conv`: length of the kernel in features."""

    @property
    def learns_mask(self) -> bool:
        """Whether S is M ⊙ W with a mask that is trained."""
        return self.kind == "spa" and self.pattern in ("learned", "adaptive")

    @property
    def drawn_pattern(self) -> str:
        """The pattern that S is drawn from at the start."""
        return self.mask.start if self.learns_mask and self.mask else self.pattern


class BatchConfig(Section):
    """Batch sizes in sequences. global = micro × data-parallel size × accumulation steps, exactly."""

    global_size: int = Field(32, gt=0)
    micro_size: int | None = Field(None, gt=0)
    """Sequences of one forward pass on one rank; default: the whole share of a rank, without accumulation."""


class DataConfig(Section):
    """A dataset folder written by `data_pipeline/prepare.py`."""

    path: str = "data/python"
    workers: int = Field(1, ge=0)
    """Threads that read ahead. The order of the data does not depend on it."""


class OptimizerConfig(Section):
    """Defaults of the paper, 5.3.1: AdamW (0.9, 0.98), weight decay 1e-2 (none on norms and biases), clipping at 1."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(5e-4, gt=0)
    """Peak learning rate, η_max."""
    betas: tuple[float, float] = Field((0.9, 0.98), strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(1e-2, ge=0)
    clip_norm: float = Field(1.0, ge=0)
    """Global gradient norm is clipped to this; 0 turns clipping off."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """What a non-finite loss or gradient norm does: skip the step on all ranks, or stop the run before it."""
    max_skipped: int = Field(100, gt=0)
    """The run stops after this many skipped steps in a row."""


class ScheduleConfig(Section):
    """The learning rate as a pure function of the step."""

    name: Literal["inverse_sqrt", "cosine", "constant"] = "inverse_sqrt"
    """`inverse_sqrt` is the paper's: lr · min(t / warmup, √(warmup / t))."""
    warmup_steps: int = Field(4000, ge=0)
    min_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Where `cosine` ends, as a share of the peak."""


class ParallelConfig(Section):
    """How one model is spread. Data parallelism is what remains: world size / tensor."""

    tensor: int = Field(1, gt=0)
    """Ranks that share each layer (Megatron tensor parallelism)."""
    sequence: bool = False
    """Megatron sequence parallelism: norms and dropout work on a slice of the sequence."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    pipeline: int = Field(1, gt=0)
    """Only 1: pipeline parallelism is not supported."""
    timeout_minutes: float = Field(10.0, gt=0)
    """A collective that waits longer than this ends the run."""


class PrecisionConfig(Section):
    """Number format of the model. Optimizer state and master weights are fp32 in every case."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp16 uses DeepSpeed's dynamic loss scale; its settings are `deepspeed.fp16.*`."""


class CheckpointConfig(Section):
    """When the run's state is written, and how much of it is kept."""

    every: int = Field(500, ge=0)
    """Steps between checkpoints; 0 writes only the last one."""
    keep: int = Field(2, gt=0)
    """Newest checkpoints that stay on disk."""


class LoggingConfig(Section):
    """What is written while the run goes on."""

    every: int = Field(10, gt=0)
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    progress: bool = True
    """A progress bar with the time that remains, on stderr of rank 0."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of one device in TFLOP/s, for MFU; default: known GPUs by name and precision; without it MFU is not reported."""


class EvaluationConfig(Section):
    """Loss and perplexity on held-out text."""

    every: int = Field(500, ge=0)
    """Steps between evaluations; 0 evaluates only at the end. A run also evaluates before its first step."""
    split: str = "validation"
    sequences: int | None = Field(None, gt=0)
    """Sequences of one evaluation over all ranks, spread evenly over the split; default: the whole split."""
    micro_size: int | None = Field(None, gt=0)
    """Sequences of one forward pass on one rank; default `batch.micro_size`."""
    patience: int | None = Field(5, gt=0)
    """Stop after this many evaluations without a better validation loss; null never stops."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    deepspeed: dict[str, Any] = Field(default={})
    """Handed to DeepSpeed as it is, after its keys are checked; keys that this config owns are refused."""
    provenance: dict[str, Any] = Field(default={})
    """Where this config comes from, as a sweep writes it; no key of it changes what is run."""

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage, 0–3."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    @property
    def run_dir(self) -> str:
        """Folder of the run's files."""
        return self.run.dir or f"runs/{self.run.name}"
