"""Workers of the mask tests: the real trainer at a layout, and a bare loop on one process with its own arithmetic of masks."""

import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spa_dist.config import Config, plan_batches
from spa_dist.errors import TrainingError
from spa_dist.model import build_model
from spa_dist.parallel.groups import Grid
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.tasks import LanguageModelling
from spa_dist.training.callbacks import Callback, MaskTraining, MetricsLog, TensorBoard
from spa_dist.training.callbacks.metrics import read_metrics
from spa_dist.training.engine import Engine
from spa_dist.training.fragments import owned_fragments
from spa_dist.training.signals import StopRequest
from spa_dist.training.state import TrainState
from spa_dist.training.trainer import Trainer
from tests.training.layouts import batch, config_with, full_tensors, start

STEPS = 50
# Adam's eps is large enough that a gradient which is nothing but rounding does not become a step of the size of lr.
MASKED: dict[str, Any] = {
    "run.steps": STEPS, "attention.trainable": False, "attention.qk_norm": False, "model.sequence_length": 8,
    "optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.eps": 1e-4, "optimizer.weight_decay": 0.1,
    "attention.mask.every": 1,
}  # fmt: skip
MAGNITUDE: dict[str, Any] = MASKED | {
    "attention.pattern": "learned", "attention.mask.method": "magnitude", "attention.sparsity": 0.7,
    "attention.mask.magnitude": {"last_step": STEPS, "regrow": 0.4},
}  # fmt: skip
GUMBEL: dict[str, Any] = MASKED | {
    "attention.pattern": "adaptive", "attention.mask.method": "gumbel", "attention.mask.gumbel": {}, "attention.mask.lr_scale": 8.0,
    "attention.mask.l0_lambda": 0.5, "attention.lr_scale": "matched",
}  # fmt: skip
L0: dict[str, Any] = MASKED | {
    "attention.pattern": "learned", "attention.mask.method": "l0", "attention.mask.l0": {}, "attention.mask.lr_scale": 8.0,
    "attention.mask.l0_lambda": 0.01, "attention.mask.l0_reduction": "sum",
}  # fmt: skip


def stream(config: Config, grid: Grid, micro_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's micro-batches of each step's global batch."""
    step = 0
    while True:
        step += 1
        inputs, targets = (part[grid.data_rank :: grid.data_size].numpy() for part in batch(config, step))
        for first in range(0, len(inputs), micro_size):
            yield inputs[first : first + micro_size], targets[first : first + micro_size]


class Watch(Callback):
    """Keeps what every step's masks and moments are."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.dirty_moments = 0

    def on_step(self, trainer: Trainer, report: Any) -> None:
        self.losses.append(report.mean_loss())
        self.norms.append(report.outcome.grad_norm)
        masks = {n: t for n, t in model_tensors(trainer.engine.model).items() if n.endswith(".mask")}
        for fragment in owned_fragments(trainer.engine):
            mask = masks.get(fragment.name.replace("projection.weight", "projection.mask"))
            if mask is not None and fragment.name.endswith("projection.weight"):
                zero = fragment.master == 0
                off = mask.reshape(-1)[fragment.start : fragment.start + fragment.master.numel()] == 0
                self.dirty_moments += int((off & ~zero).sum())
                self.dirty_moments += sum(int((m[zero] != 0).sum()) for m in fragment.moments.values())


def train_masks(config: Config, grid: Grid, events: Path | None = None) -> dict[str, Any]:
    """The run at this grid: losses, norms, the full tensors, the lines of the log about masks. events: TensorBoard's folder."""
    plan = plan_batches(config, dist.get_world_size())
    engine = Engine(config, plan, build_model(config, grid), grid)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder) / "metrics.jsonl")
        tensorboard = TensorBoard(events, log) if events else None
        callbacks = [log, *([tensorboard] if tensorboard else []), MaskTraining(config, log, tensorboard), watch]
        batches = stream(config, grid, plan.micro_size)
        task = LanguageModelling()
        Trainer(config, plan, grid, engine, task, batches, 100, TrainState(), callbacks, StopRequest()).run()
        lines = read_metrics(Path(folder) / "metrics.jsonl") if grid.is_first else []
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "dirty_moments": watch.dirty_moments,
        "tensors": full_tensors(engine) | full_buffers(engine),
        "lines": [line for line in lines if any(key.startswith("mask_") for key in line)],
    }


def full_buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """The whole masks; NaN where ranks that hold the same part disagree in a single bit."""
    own = {name: tensor for name, tensor in model_tensors(engine.model).items() if not tensor.requires_grad}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.grid.tensor_rank, own))
    full = {}
    for name, entry in parameter_layout(engine.config).items():
        if not entry.buffer:
            continue
        parts: list[list[torch.Tensor]] = [[] for _ in range(engine.grid.tensor_size)]
        for rank, tensors in everyone:
            parts[rank].append(tensors[name])
        same = all(torch.equal(copy, copies[0]) for copies in parts for copy in copies)
        whole = torch.cat([copies[0] for copies in parts], dim=0) if entry.dim is not None else parts[0][0]
        same = same and (entry.dim is not None or all(torch.equal(copies[0], whole) for copies in parts))
        full[name] = whole.float() if same else torch.full(entry.shape, torch.nan)
    return full


def train_bare(config: Config) -> dict[str, Any]:
    """One process, no trainer: torch's own AdamW, the penalty by hand, masks by sorting Python lists."""
    model = build_model(config, Grid(0, 1, 0, 1, torch.device("cpu")))
    tensors = model_tensors(model)
    named = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    optimizer, mask = config.optimizer, config.attention.mask
    assert mask is not None and config.model.head_dim and config.attention.d_proj
    matched = config.attention.d_proj / config.model.head_dim if config.attention.lr_scale == "matched" else 1.0
    scales = {"mask_logits": mask.lr_scale, "query": matched, "key": matched}
    groups = [
        {
            "params": [tensor],
            "lr": optimizer.lr * math.prod(scale for part, scale in scales.items() if part in name),
            "weight_decay": optimizer.weight_decay if tensor.dim() > 1 and "mask_logits" not in name else 0.0,
        }
        for name, tensor in named.items()
    ]
    adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, foreach=False, fused=False)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        model.noise.step = step
        inputs, targets = batch(config, step)
        projections = {n: t for n, t in named.items() if n.endswith("projection.weight")}
        dense = dense_gradients(model, config, inputs, targets) if mask.method == "magnitude" else {}
        loss = LanguageModelling.loss(model, inputs, targets) / LanguageModelling.valid_targets(targets)
        losses.append(loss.item())
        (loss + bare_penalty(config, named)).backward()
        norm = math.sqrt(sum(float(t.grad.double().square().sum()) for t in named.values() if t.grad is not None))
        norms.append(norm)
        for tensor in named.values():
            assert tensor.grad is not None
            tensor.grad *= min(1.0, optimizer.clip_norm / norm)
        adam.step()
        adam.zero_grad()
        for name in projections if mask.method == "magnitude" else ():
            bare_update(config, step, tensors[name], tensors[name.replace("weight", "mask")], dense[name], adam.state)
    return {"losses": losses, "norms": norms, "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()}}


def dense_gradients(model: Any, config: Config, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """∇_S of every entry, by differentiating with all masks at one and W multiplied by the mask in its values alone."""
    tensors = model_tensors(model)
    names = [name for name in tensors if name.endswith("projection.weight")]
    saved = {name: (tensors[name].data.clone(), tensors[name.replace("weight", "mask")].clone()) for name in names}
    for name in names:
        weight, mask = saved[name]
        tensors[name].data.copy_(weight * mask)
        tensors[name.replace("weight", "mask")].fill_(1.0)
    loss = LanguageModelling.loss(model, inputs, targets)
    found = torch.autograd.grad(loss, [tensors[name] for name in names])
    for name in names:
        tensors[name].data.copy_(saved[name][0])
        tensors[name.replace("weight", "mask")].copy_(saved[name][1])
    return dict(zip(names, found))


def bare_penalty(config: Config, named: dict[str, torch.Tensor]) -> torch.Tensor:
    """λ times the mean, or sum, of P(gate on), written out."""
    mask = config.attention.mask
    logits = [tensor for name, tensor in named.items() if name.endswith("mask_logits")]
    if mask is None or not logits:
        return torch.zeros(())
    shift = 2 / 3 * math.log(0.1 / 1.1) if mask.method == "l0" else 0.0
    probabilities = torch.cat([1 / (1 + torch.exp(-(t.flatten() - shift))) for t in logits])
    return mask.l0_lambda * (probabilities.mean() if mask.l0_reduction == "mean" else probabilities.sum())


@torch.no_grad()
def bare_update(
    config: Config, step: int, weight: torch.Tensor, mask: torch.Tensor, gradient: torch.Tensor, state: Any
) -> None:
    """One update of one mask, entry by entry."""
    section = config.attention.mask.magnitude  # type: ignore[union-attr]
    assert section is not None
    t = step / section.last_step
    sparsity = config.attention.sparsity * (1 - (1 - t) ** 3)  # from a dense start
    for head in range(len(mask)):
        size = mask[head].numel()
        keep = int((1 - sparsity) * size + 0.5)
        grow = round(section.regrow / 2 * (1 + math.cos(math.pi * t)) * keep)
        flat_w, flat_g = weight[head].abs().flatten().tolist(), gradient[head].abs().flatten().tolist()
        on = [i for i, m in enumerate(mask[head].flatten().tolist()) if m]
        stay = sorted(on, key=lambda i: (-flat_w[i], i))[: keep - grow]
        rest = [i for i in range(size) if i not in set(stay)]
        new = sorted(rest, key=lambda i: (-flat_g[i], i))[:grow]
        for i in rest:
            weight[head].view(-1)[i] = 0.0
            for moment in ("exp_avg", "exp_avg_sq"):
                state[weight][moment][head].view(-1)[i] = 0.0
        mask[head].view(-1).zero_()[torch.tensor(stay + new)] = 1.0


def compare_masks(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (config changes), how it differs from the bare loop; in order of tensor-parallel size."""
    start(1)
    references: dict[str, dict[str, Any]] = {}
    for case in cases if dist.get_rank() == 0 else ():
        if repr(layout_free(case)) not in references:
            references[repr(layout_free(case))] = train_bare(config_with(layout_free(case)))
    results, size, grid = [], 0, None
    for case in sorted(cases, key=lambda case: case.get("parallel.tensor", 1)):
        tensor = case.get("parallel.tensor", 1)
        if tensor != size:
            size, grid = tensor, start(tensor)
        assert grid is not None
        result = train_masks(config_with(case), grid)
        dirty = torch.tensor(result["dirty_moments"])
        dist.all_reduce(dirty)
        if grid.is_first:
            results.append(
                {"case": case, "dirty_moments": int(dirty)} | against(result, references[repr(layout_free(case))])
            )
    return results


def layout_free(case: dict[str, Any]) -> dict[str, Any]:
    """The case without what must not matter, and in full precision."""
    matters = {key: value for key, value in case.items() if not key.startswith(("parallel.", "deepspeed.", "batch.micro"))}
    return {key: value for key, value in sorted(matters.items()) if key not in ("precision.dtype", "attention.fold")}


def against(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Largest differences; NaN, which stands for ranks that disagree, counts as infinite."""
    worst = {"mask": 0.0, "learned": 0.0, "other": 0.0}
    for name, tensor in result["tensors"].items():
        kind = "mask" if name.endswith(".mask") else "learned" if "projection" in name or "gate" in name else "other"
        difference = float((tensor - reference["tensors"][name]).abs().max())
        worst[kind] = max(worst[kind], difference if math.isfinite(difference) else math.inf)
    loss = max(abs(a - b) for a, b in zip(result["losses"], reference["losses"]))
    norm = max(abs(a / b - 1) for a, b in zip(result["norms"], reference["norms"]))
    return worst | {"loss": loss, "norm": norm, "lines": result["lines"], "steps": len(result["losses"])}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def guarded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case, what the guard said, how the run ended, and the lines of the log about masks."""
    grid, results = start(1), []
    for case in cases:
        handler = _Lines()
        logging.getLogger("spa_dist").addHandler(handler)
        ended, lines = "finished", []
        try:
            lines = train_masks(config_with(case), grid)["lines"]
        except TrainingError as error:
            ended = str(error)
        logging.getLogger("spa_dist").removeHandler(handler)
        results.append({"said": handler.lines, "ended": ended, "lines": lines})
    return results


def tensorboard_of(argument: dict[str, Any]) -> dict[str, Any]:
    """Run a case with TensorBoard on: its scalar tags, and the steps and sizes of its images."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        train_masks(config_with(argument), start(1), Path(folder))
        events = EventAccumulator(folder, size_guidance={"images": 0, "scalars": 0})
        events.Reload()
        images = {tag: [(e.step, e.height, e.width) for e in events.Images(tag)] for tag in events.Tags()["images"]}
        return {"scalars": events.Tags()["scalars"], "images": images}
