"""DeepSpeed's engine behind four verbs: forward, backward, step, fragments. The only importer of deepspeed, with `fragments.py`."""

import logging
import math
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns on each start that it found nothing better

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator

from spa_dist.config import BatchPlan, Config
from spa_dist.errors import ConfigError
from spa_dist.model import Decoder
from spa_dist.parallel.groups import Grid, tensor_group
from spa_dist.parallel.mpu import ModelParallelUnit
from spa_dist.training.optimizer import build_optimizer

# On a CPU DeepSpeed compiles a shared-memory all-reduce at start-up, which takes half a minute; gloo does the same work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed refuses to start without it, where no launcher has set it


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did; the same on every rank."""

    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """The gradient was not finite, and nothing was changed."""
    loss_scale: float


class Engine:
    """One rank's part of the model under DeepSpeed.

    The gradient of a batch is exactly that of `sum over its valid tokens / their global number`: DeepSpeed divides by the
    accumulation steps and averages over data-parallel ranks, and `backward` multiplies by both.
    """

    def __init__(self, config: Config, plan: BatchPlan, model: Decoder, grid: Grid):
        if config.precision.dtype == "fp16" and not get_accelerator().is_fp16_supported():
            raise ConfigError("precision.dtype=fp16 is not supported by this machine's device: use bf16 or fp32")
        _quieten()
        self.config, self.plan, self.grid, self.model = config, plan, grid, model
        self._owns_norm = config.precision.dtype == "fp32" and config.zero_stage == 0
        model.to(grid.device)
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model, config),
            config=deepspeed_config(config, plan, clip=not self._owns_norm),
            mpu=ModelParallelUnit(),
            dist_init_required=False,
        )
        assert self.deepspeed.train_batch_size() == plan.global_size, "DeepSpeed sees another data-parallel size"
        self.optimizer = self.deepspeed.optimizer
        _let_loss_scale_rest_at_minimum(self.optimizer)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's forward pass, with ZeRO's gathering."""
        return self.deepspeed(*args, **kwargs)

    def backward(self, loss_sum: torch.Tensor, global_valid_tokens: int, penalty: torch.Tensor | None = None) -> None:
        """Accumulate the gradient of `loss_sum / global_valid_tokens`, and this micro-batch's share of a penalty's.

        penalty: a scalar, the same on each data-parallel rank and for each micro-batch of a step; it counts once in a step.

        A non-finite loss gives a non-finite gradient whatever its cause, so that the step is skipped on all ranks alike.
        """
        factor = self.plan.data_parallel_size * self.plan.accumulation_steps / max(1, global_valid_tokens)
        poison = torch.where(torch.isfinite(loss_sum.detach()), 1.0, torch.nan)
        total = loss_sum * factor if penalty is None else loss_sum * factor + penalty
        self.deepspeed.backward(total * poison)

    def step(self, lr: float) -> StepOutcome | None:
        """Update the parameters; None before the last micro-batch of an accumulation."""
        if not self.deepspeed.is_gradient_accumulation_boundary():
            self.deepspeed.step()
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        scale = float(getattr(self.optimizer, "cur_scale", 0.0) or getattr(self.optimizer, "loss_scale", 1.0) or 1.0)
        if self._owns_norm:
            norm = self._clip_or_drop()
            self.deepspeed.step()
            return StepOutcome(norm, skipped=not math.isfinite(norm), loss_scale=1.0)
        self.deepspeed.step()
        norm = float(self.deepspeed.get_global_grad_norm())
        if hasattr(
            self.optimizer, "fp32_groups"
        ):  # DeepSpeed's unfused optimizer reports the norm with the loss scale in it
            norm /= scale
        skipped = bool(getattr(self.optimizer, "overflow", False))
        return StepOutcome(math.nan if skipped else norm, skipped=skipped, loss_scale=scale)

    @torch.no_grad()
    def _clip_or_drop(self) -> float:
        """Clip the gradients of ZeRO 0 in fp32, or drop them where they are not finite, and give their global norm.

        DeepSpeed leaves this case to the caller: it would step on a NaN.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        first = self.grid.tensor_rank == 0
        counted = [g for p, g in zip(parameters, gradients) if first or p.tensor_model_parallel]  # type: ignore[attr-defined]
        squares = torch.stack(torch._foreach_norm(counted)).double().square().sum() if counted else torch.zeros(())
        total = squares.to(self.grid.device, torch.float64).reshape(1)
        if self.grid.tensor_size > 1:
            dist.all_reduce(total, group=tensor_group())
        norm = float(total.sqrt())
        clip = self.config.optimizer.clip_norm
        if not math.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
        elif clip and norm > clip:
            torch._foreach_mul_(gradients, clip / (norm + 1e-6))
        return norm


def deepspeed_config(config: Config, plan: BatchPlan, *, clip: bool) -> dict[str, Any]:
    """What DeepSpeed is given: the keys that this config owns, and the `deepspeed` section as it is."""
    dtype = config.precision.dtype
    section = {key: dict(value) if isinstance(value, dict) else value for key, value in config.deepspeed.items()}
    owned: dict[str, Any] = {
        "train_batch_size": plan.global_size,
        "train_micro_batch_size_per_gpu": plan.micro_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": config.optimizer.clip_norm if clip else 0.0,
        "steps_per_print": None,
    }
    defaults: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if dtype == "bf16" and config.zero_stage > 0:
        defaults["data_types"] = {"grad_accum_dtype": "fp32"}
    for name in ("bf16", "fp16"):
        section[name] = {**section.get(name, {}), "enabled": dtype == name}
    return defaults | section | owned


def _quieten() -> None:
    """DeepSpeed reports its set-up in some forty lines per rank; errors and warnings are left, but for one that is for its authors."""
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated.*", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def _let_loss_scale_rest_at_minimum(optimizer: Any) -> None:
    """DeepSpeed raises when the loss scale is at its minimum and overflows again; `optimizer.max_skipped` bounds that here."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False
