"""Training one recall model in this process: batches without end, accuracy on sequences that are the same for every run."""

import time
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from spa_dist.attention import query_key_lr_scale
from spa_dist.attention.masks import (
    LearnedProjection,
    PruningSchedule,
    mask_penalty,
    mask_report,
    set_step,
    update_masks,
)
from spa_dist.comparison.jobs import Job
from spa_dist.comparison.recall.data import recall_batch
from spa_dist.comparison.recall.model import WIDTH, RecallModel, truncated

HEAD_DIM = WIDTH
WIDTHS = (32, 16, 8)
"""d_k′: d_k/4, d_k/8 and d_k/16."""
PAIRS = (16, 48, 96)
STEPS = 500
SEQUENCES = 16
"""Of a step."""
EVALUATE_EVERY = 20
HELD_OUT = 64
"""Sequences of an evaluation."""
SOLVED = 0.99
LEARNING_RATE = 1e-3
"""Of all but W_Q and W_K of SPA, whose rate the variant scales."""
SETTINGS: dict[str, Any] = {"every": 40, "l0_lambda": {"gumbel": 0.2, "l0": 0.23}}
"""Steps between mask updates, and the λ at which the density ends near 20 %."""
FIRST_SEED = 4321


def settings(steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> dict[str, Any]:
    """What, besides the job, decides a run's result."""
    sizes = {"steps": steps, "sequences": SEQUENCES, "evaluate_every": EVALUATE_EVERY, "held_out": HELD_OUT}
    return {**sizes, "learning_rate": learning_rate, **SETTINGS}


def run(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate one job."""
    assert job.pairs is not None
    began = time.perf_counter()
    seed, steps = FIRST_SEED + job.seed, settings["steps"]
    section = job.definition().attention(job.d_proj or HEAD_DIM, settings)
    torch.manual_seed(seed)
    model = RecallModel(section, steps, seed)
    optimizer = make_optimizer(model, section, settings["learning_rate"])
    data = Generator().manual_seed(seed)
    held_out = recall_batch(settings["held_out"], job.pairs, Generator().manual_seed(FIRST_SEED - 1))
    curve = [{"step": 0, "accuracy": accuracy(model, held_out)}]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * group["factor"] * rate(step, steps)
        loss = train_step(model, optimizer, recall_batch(settings["sequences"], job.pairs, data), section, step, steps)
        if step % settings["evaluate_every"] == 0 or step == steps:
            curve.append({"step": step, "accuracy": accuracy(model, held_out), "loss": float(loss)})
    final = {"accuracy": curve[-1]["accuracy"], "solved_at": solved_at(curve), **facts(model, section, held_out)}
    result = {"config": {"attention": section, "model": {"width": WIDTH}, "seed": seed}, "curve": curve, "final": final}
    return {**result, **costs(model, job.pairs), "seconds": time.perf_counter() - began}


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over a twentieth of the run, down linearly over its last quarter to a tenth."""
    warm, cool = steps / 20, steps / 4
    return min(1.0, step / warm, 0.1 + 0.9 * (steps - step) / cool)


def make_optimizer(model: nn.Module, section: dict[str, Any], lr: float) -> torch.optim.Optimizer:
    """Adam; W_Q, W_K and the logits of a mask have learning rates of their own, as in the trainer."""
    query_key = query_key_lr_scale(section.get("lr_scale", 1.0), section["kind"], HEAD_DIM, section["d_proj"])
    groups = []
    for name, parameter in model.named_parameters():
        is_logit = getattr(parameter, "no_weight_decay", False)
        is_query_or_key = name in ("attention.query.weight", "attention.key.weight")
        factor = section["mask"]["lr_scale"] if is_logit else query_key if is_query_or_key else 1.0
        groups.append({"params": [parameter], "factor": factor})
    return torch.optim.Adam(groups, lr=lr, betas=(0.9, 0.98), fused=True)


def train_step(
    model: RecallModel,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor, Tensor],
    section: dict[str, Any],
    step: int,
    steps: int,
) -> Tensor:
    """Forward, backward, update; then the mask, where it is due. Returns the cross-entropy before the update."""
    context, questions, answers = batch
    mask = section.get("mask") or {}
    set_step(model, step)
    loss = F.cross_entropy(model(context, questions).flatten(0, 1), answers.flatten())
    penalty = mask.get("l0_lambda", 0.0) * mask_penalty(model)
    optimizer.zero_grad()
    (loss + penalty).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if mask:
        schedule = PruningSchedule(section["sparsity"], 0, steps * 3 // 4, mask["every"])
        update_masks(model, step, schedule, optimizer)
    return loss.detach()


@torch.no_grad()
def accuracy(
    model: RecallModel, batch: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, Tensor] | None = None
) -> float:
    """Share of the questions that are answered rightly, with the deterministic mask."""
    context, questions, answers = batch
    model.eval()
    right = model(context, questions, weights).argmax(-1) == answers
    model.train()
    return float(right.double().mean())


def solved_at(curve: list[dict[str, Any]]) -> int | None:
    """The first evaluated step from which the accuracy stays at 99 % or above; None where it does not end there."""
    first = None
    for point in reversed(curve):
        if point["accuracy"] < SOLVED:
            break
        first = point["step"]
    return first


@torch.no_grad()
def facts(model: RecallModel, section: dict[str, Any], held_out: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """S and gate as they ended; of dense attention, its accuracy when W_Qᵀ W_K is truncated to each d_k′."""
    model.eval()
    attention, found = model.attention, {}
    if isinstance(attention.projection, LearnedProjection):
        report = mask_report(attention.projection())
        found = {
            "mask_density": [report.density],
            "mask_effective_rank": [report.effective_rank],
            "mask_rank": [report.rank],
        }
    if attention.gate is not None:
        found["mask_gates"] = [attention.gate.exp().tolist()]
    if section["kind"] == "dense":
        cut = {str(rank): truncated(*attention.weights(), rank) for rank in WIDTHS}
        found["truncated_accuracy"] = {rank: accuracy(model, held_out, weights) for rank, weights in cut.items()}
    return found


def costs(model: RecallModel, pairs: int) -> dict[str, Any]:
    """Parameters, and operations of a forward pass per token of context and question; a multiply-add is two."""
    attention = model.attention
    width = attention.weights()[0].shape[0]
    context, questions, size = 2 * pairs, pairs, WIDTH * WIDTH
    everywhere = (context + questions) * 2 * size  # the convolution
    in_context = context * (width * WIDTH + size)  # keys and values
    asked = questions * (width * WIDTH + size + WIDTH * model.head.out_features + context * (width + WIDTH))
    flops = 2.0 * (everywhere + in_context + asked) / (context + questions)
    trained = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in attention.parameters())
    return {
        "parameters": trained,
        "folded_parameters": trained - own + 2 * width * WIDTH + 2 * size,
        "forward_flops_per_token": flops,
        "training_flops_per_token": 3 * flops,
        "cache_numbers_per_token": width + WIDTH,
    }
