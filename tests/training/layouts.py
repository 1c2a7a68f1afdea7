"""Workers of the layout tests: one small model trained a few steps, bare on one process and under DeepSpeed at a layout."""

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist

from spa_dist.config import Config, config_from_dict, plan_batches
from spa_dist.model import build_model
from spa_dist.parallel import groups
from spa_dist.parallel.groups import Grid, Launch, start_process_groups
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.tasks import LanguageModelling
from spa_dist.training.engine import Engine
from spa_dist.training.fragments import owned_fragments

STEPS = 3
SMALL: dict[str, Any] = {
    "run": {"steps": STEPS, "seed": 5},
    "model": {
        "num_layers": 2, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "value_dim": 6,
        "ffn_hidden_size": 48, "sequence_length": 16, "vocab_size": 61, "vocab_multiple": 8, "init_std": 0.2,
    },
    "attention": {"d_proj": 4, "sparsity": 0.5, "trainable": True, "qk_norm": True},
    "batch": {"global_size": 8},
    "optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip_norm": 1.0},
    "schedule": {"name": "constant"},
}  # fmt: skip


def config_with(changes: dict[str, Any]) -> Config:
    """SMALL with `section.key` changes."""
    tree = {section: dict(values) for section, values in SMALL.items()}
    for dotted, value in changes.items():
        *path, key = dotted.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[key] = value
    return config_from_dict(tree)


def batch(config: Config, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step; rows have unequal numbers of valid targets."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.batch.global_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size or 0, shape, generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(len(targets)):
        targets[row, len(targets[row]) - row :] = -100
    return tokens[:, :-1], targets


def train_bare(config: Config, scaled: str | None = None) -> dict[str, Any]:
    """A plain PyTorch loop over the whole batch on one process; `scaled` names a parameter whose gradient is halved."""
    model = build_model(config, Grid(0, 1, 0, 1, torch.device("cpu")))
    tensors = model_tensors(model)
    parameters = [tensor for tensor in tensors.values() if tensor.requires_grad]
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        inputs, targets = batch(config, step)
        loss = LanguageModelling.loss(model, inputs, targets) / LanguageModelling.valid_targets(targets)
        gradients = dict(zip([n for n, t in tensors.items() if t.requires_grad], torch.autograd.grad(loss, parameters)))
        if scaled:
            gradients[scaled] *= 0.5
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        factor = min(1.0, config.optimizer.clip_norm / norm) if config.optimizer.clip_norm else 1.0
        with torch.no_grad():
            for name, gradient in gradients.items():
                tensors[name] -= config.optimizer.lr * factor * gradient
        losses.append(loss.item())
        norms.append(norm)
    return {"losses": losses, "norms": norms, "tensors": {n: t.detach().clone() for n, t in tensors.items()}}


def train_at_layout(config: Config, grid: Grid) -> dict[str, Any]:
    """The same steps under DeepSpeed at this grid, and the full fp32 parameters from the ranks' fragments."""
    plan = plan_batches(config, dist.get_world_size())
    engine = Engine(config, plan, build_model(config, grid), grid)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        inputs, targets = (part[grid.data_rank :: grid.data_size] for part in batch(config, step))
        valid = LanguageModelling.valid_targets(batch(config, step)[1])
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(inputs), plan.micro_size):
            rows = slice(start, start + plan.micro_size)
            loss = LanguageModelling.loss(engine.forward, inputs[rows], targets[rows])
            engine.backward(loss, valid)
            total += loss.detach()
            outcome = engine.step(config.optimizer.lr)
        dist.all_reduce(total, group=groups.data_group())
        losses.append(float(total) / valid)
        assert outcome is not None
        norms.append(outcome.grad_norm)
    return {"losses": losses, "norms": norms, "tensors": full_tensors(engine)}


def full_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """The full fp32 parameters, put together from every rank's fragments."""
    own = [(f.name, f.start, f.master.clone()) for f in owned_fragments(engine)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.grid.tensor_rank, own))
    full = {}
    for name, entry in parameter_layout(engine.config).items():
        if entry.buffer:
            continue
        shape = entry.local_shape(engine.grid.tensor_size)
        parts = [torch.full(shape, torch.nan).view(-1) for _ in range(engine.grid.tensor_size)]
        for rank, fragments in everyone:
            for fragment_name, start, values in fragments:
                if fragment_name == name:
                    parts[rank][start : start + values.numel()] = values
        pieces = [part.view(shape) for part in parts]
        if entry.dim is not None:
            full[name] = torch.cat(pieces, dim=entry.dim)
        else:
            # A replicated parameter must have stayed the same on each tensor-parallel rank, bit for bit.
            full[name] = (
                pieces[0] if all(torch.equal(piece, pieces[0]) for piece in pieces) else torch.full(shape, torch.nan)
            )
    return full


def differences(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Largest differences of losses, relative gradient norms, and parameters; NaN counts as infinite."""
    worst, worst_name = 0.0, ""
    for name, tensor in result["tensors"].items():
        difference = float((tensor - reference["tensors"][name]).abs().max())
        if not difference <= worst:
            worst, worst_name = (difference if math.isfinite(difference) else math.inf), name
    loss = max(abs(a - b) for a, b in zip(result["losses"], reference["losses"]))
    norm = max(abs(a / b - 1) for a, b in zip(result["norms"], reference["norms"]))
    return {"loss": loss, "norm": norm, "parameter": worst, "where": worst_name}


def start(tensor_size: int) -> Grid:
    """Join the world at a tensor-parallel size. Each call makes gloo groups whose threads stay, so a worker changes size as
    seldom as it can."""
    return start_process_groups(Launch.from_environment(), torch.device("cpu"), tensor_size, 2.0)


def compare_layouts(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case (config changes), the differences from the bare loop on one process; in order of tensor-parallel size."""
    start(1)
    references: dict[str, dict[str, Any]] = {}
    for case in cases:
        model = model_of(case)
        references.setdefault(str(model), train_bare(config_with(model)))
    results = []
    size, grid = 0, None
    for case in sorted(cases, key=lambda case: case["parallel.tensor"]):
        broken = case.pop("break", None)
        if case["parallel.tensor"] != size:
            size = case["parallel.tensor"]
            grid = start(size)
        with without_summing(broken) if broken else contextlib.nullcontext():
            result = train_at_layout(config_with(case), grid)
        results.append(case | {"break": broken} | differences(result, references[str(model_of(case))]))
    return results


def model_of(case: dict[str, Any]) -> dict[str, Any]:
    """The changes of a case that make another model or another optimizer, without those that spread it differently."""
    return {
        key: value for key, value in case.items() if key.split(".")[0] not in ("parallel", "deepspeed", "batch", "break")
    }


@contextlib.contextmanager
def without_summing(module: str) -> Any:
    """Break the code: `sum_gradient` of one module no longer sums over the tensor-parallel group."""
    import importlib

    broken = importlib.import_module(module)
    right = broken.sum_gradient
    broken.sum_gradient = lambda tensor: tensor
    try:
        yield
    finally:
        broken.sum_gradient = right


def sensitivity(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each parameter, what halving its gradient in the bare loop changes."""
    start(1)
    config = config_with(changes)
    right = train_bare(config)
    names = [name for name, entry in parameter_layout(config).items() if not entry.buffer]
    return {name: differences(train_bare(config, scaled=name), right) for name in names}
