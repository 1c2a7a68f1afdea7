"""Worker of the tests on real checkpoints: train a step at each layout, save, and keep what the trainer computes beside it."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from spa_dist.config import config_from_dict, plan_batches
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.write import ExportOptions, write_export
from spa_dist.model import build_model
from spa_dist.parallel.groups import Grid, tensor_group
from spa_dist.parallel.layout import model_tensors, parameter_layout
from spa_dist.training.checkpoint.find import newest_good_checkpoint
from spa_dist.training.checkpoint.import_export import import_export
from spa_dist.training.checkpoint.restore import check_same_model, load_optimizer, load_weights
from spa_dist.training.checkpoint.write import save_checkpoint
from spa_dist.training.engine import Engine
from spa_dist.training.state import TrainState
from tests.training.elastic import one_step
from tests.training.layouts import batch, config_with, start

TOKENIZER = b"a tokenizer"


def train_and_save(argument: dict[str, Any]) -> int:
    """Write folder/<name> for each case {"name", "changes"}: a run of one checkpoint, and `trainer.pt`, what its trainer
    computed. A case's "import" says with which `fold` its export is imported and trained on. Cases come in order of
    tensor-parallel size."""
    size, grid = 0, None
    for case in argument["cases"]:
        config = config_with(case["changes"])
        if config.parallel.tensor != size:
            size = config.parallel.tensor
            grid = start(size)
        assert grid is not None
        engine = Engine(config, plan_batches(config, dist.get_world_size()), build_model(config, grid), grid)
        one_step(engine, 1)
        run_dir = Path(argument["folder"]) / case["name"]
        _save(run_dir, engine, grid)
        for fold in case.get("import", ()):
            _import_and_restore(run_dir, f"again-{fold}", fold, grid)
    return len(argument["cases"])


def _import_and_restore(run_dir: Path, name: str, fold: bool, grid: Grid) -> None:
    """Export, import, restore under DeepSpeed at this layout, take a step; keep the logits before the step."""
    if grid.is_first:
        write_export(open_checkpoint(run_dir), run_dir / "export", ExportOptions(fold=fold), force=True)
        import_export(run_dir / "export", run_dir / name)
    dist.barrier()
    config = config_from_dict(json.loads((run_dir / name / "config.json").read_text()))
    checkpoint = newest_good_checkpoint(run_dir / name)
    assert checkpoint is not None
    check_same_model(config, checkpoint)
    model = build_model(config, grid)
    load_weights(model, checkpoint, config, grid)
    engine = Engine(config, plan_batches(config, dist.get_world_size()), model, grid)
    load_optimizer(engine, checkpoint)
    logits = _logits(engine)
    engine.deepspeed.train()
    loss = one_step(engine, 2)["loss"]
    if grid.is_first:
        torch.save({"logits": logits, "loss": loss}, run_dir / f"{name}.pt")


def _logits(engine: Engine) -> torch.Tensor:
    """[B, N, V padded] for held-out tokens."""
    engine.deepspeed.eval()
    with torch.no_grad():
        return _joined(engine.forward(batch(engine.config, 99)[0]), -1)


def _save(run_dir: Path, engine: Engine, grid: Grid) -> None:
    """The checkpoint; the trainer's logits [B, N, V padded] for held-out tokens [B, N]; the parameters it multiplied with,
    which in a low-precision run are rounded."""
    tokenizer = {"file": "tokenizer.model", "sha256": hashlib.sha256(TOKENIZER).hexdigest(), "eos_id": 0, "vocab_size": 61}
    save_checkpoint(run_dir, engine, TrainState(step=1, cursor=8, tokens=100), tokenizer, keep=1)
    logits = _logits(engine)
    working = _working_tensors(engine) if engine.config.precision.dtype != "fp32" else {}
    if grid.is_first:
        (run_dir / "tokenizer.model").write_bytes(TOKENIZER)
        torch.save({"tokens": batch(engine.config, 99)[0], "logits": logits, "working": working}, run_dir / "trainer.pt")


def _working_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """The full tensors of the model that the forward pass reads, in their own dtype."""
    gather = deepspeed.zero.GatheredParameters(list(engine.model.parameters()))
    with gather if engine.config.zero_stage == 3 else contextlib.nullcontext():
        tensors, layout = model_tensors(engine.model), parameter_layout(engine.config)
        return {name: _joined(tensor.detach(), layout[name].dim) for name, tensor in tensors.items()}


def _joined(part: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The tensor-parallel ranks' parts, in order."""
    if dim is None:
        return part.clone()
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(tensor_group().size())]
    dist.all_gather(parts, part.contiguous(), group=tensor_group())
    return torch.cat(parts, dim=dim)
