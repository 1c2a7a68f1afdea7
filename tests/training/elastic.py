"""Workers of the checkpoint tests: save at one layout, go on at another, and read the same checkpoint as a plain model."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from spa_dist.config import plan_batches
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.evaluate import total_loss
from spa_dist.model import build_model
from spa_dist.parallel.groups import Grid, data_group
from spa_dist.tasks import LanguageModelling
from spa_dist.training.checkpoint.find import newest_good_checkpoint
from spa_dist.training.checkpoint.restore import check_same_model, load_optimizer, load_weights, restored_state
from spa_dist.training.checkpoint.write import save_checkpoint
from spa_dist.training.engine import Engine
from spa_dist.training.state import TrainState
from tests.training.layouts import batch, config_with, start

TOKENIZER = {"file": "tokenizer.model", "sha256": "0" * 64, "eos_id": 0, "vocab_size": 61}
ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.02, "optimizer.weight_decay": 0.01}


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on a CPU without native support; torch computes it all the same, which is enough for the scaler."""
    get_accelerator().is_fp16_supported = lambda: True


def one_step(engine: Engine, step: int) -> dict[str, Any]:
    """Loss and outcome of one optimizer step on that step's batch."""
    grid, plan = engine.grid, engine.plan
    whole = batch(engine.config, step)
    valid = LanguageModelling.valid_targets(whole[1])
    inputs, targets = (part[grid.data_rank :: grid.data_size] for part in whole)
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(inputs), plan.micro_size):
        rows = slice(first, first + plan.micro_size)
        loss = LanguageModelling.loss(engine.forward, inputs[rows], targets[rows])
        engine.backward(loss, valid)
        total += loss.detach()
        outcome = engine.step(engine.config.optimizer.lr)
    dist.all_reduce(total, group=data_group())
    assert outcome is not None
    return {"loss": float(total) / valid, "norm": outcome.grad_norm, "scale": outcome.loss_scale, "skipped": outcome.skipped}


def held_out_loss(engine: Engine) -> float:
    """The trainer's own loss on a batch that was not trained on."""
    inputs, targets = batch(engine.config, 99)
    engine.deepspeed.eval()
    with torch.no_grad():
        loss = LanguageModelling.loss(engine.forward, inputs, targets)
    engine.deepspeed.train()
    return float(loss) / LanguageModelling.valid_targets(targets)


def resumed(run_dir: Path, changes: dict[str, Any], grid: Grid) -> tuple[Engine, TrainState]:
    """An engine at this layout, filled from the newest checkpoint."""
    config = config_with(changes)
    checkpoint = newest_good_checkpoint(run_dir)
    assert checkpoint is not None
    check_same_model(config, checkpoint)
    model = build_model(config, grid)
    load_weights(model, checkpoint, config, grid)
    engine = Engine(config, plan_batches(config, dist.get_world_size()), model, grid)
    load_optimizer(engine, checkpoint)
    return engine, restored_state(checkpoint)


def save_and_continue(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case: train and save at its layout, read the checkpoint as a plain model, and go on at each layout asked for.

    A case is {"changes", "then": [changes, …]}; layouts that follow one another share a tensor-parallel size where they can.
    """
    allow_fp16()
    results, size, grid = [], 0, None
    for number, case in enumerate(argument["cases"]):
        run_dir = Path(argument["folder"]) / str(number)
        changes = ADAM | case["changes"]
        config = config_with(changes)
        if config.parallel.tensor != size:
            size = config.parallel.tensor
            grid = start(size)
        assert grid is not None
        engine = Engine(config, plan_batches(config, dist.get_world_size()), build_model(config, grid), grid)
        for step in (1, 2):
            one_step(engine, step)
        save_checkpoint(run_dir, engine, TrainState(step=2, cursor=16, tokens=100), TOKENIZER, keep=2)
        trained = held_out_loss(engine)
        plain = [plain_loss(run_dir, config_with(changes), fold) for fold in (True, False)] if dist.get_rank() == 0 else []
        continued = [one_step(engine, step) for step in (3, 4)]
        result = {"changes": case["changes"], "trained": trained, "plain": plain, "continued": continued, "then": []}
        for other in case["then"]:
            merged = changes | other
            tensor = merged.get("parallel.tensor", 1)
            if tensor != size:
                size, grid = tensor, start(tensor)
            again, state = resumed(run_dir, merged, grid)
            steps = [one_step(again, step) for step in (3, 4)]
            result["then"].append({"changes": other, "steps": steps, "cursor": state.cursor})
        results.append(copy.deepcopy(result))
    return results


def plain_loss(run_dir: Path, config: Any, fold: bool) -> float:
    """The loss of the exported model on the same held-out batch."""
    model = load_plain_model(open_checkpoint(run_dir), fold=fold)
    inputs, targets = batch(config, 99)
    total, tokens = total_loss(model, [(inputs, targets)])
    return total / tokens


def choose(folder: str) -> dict[str, Any]:
    """Which checkpoint every rank would resume from, or the error they all get."""
    start(1)
    try:
        found = newest_good_checkpoint(Path(folder))
        answer = found.folder.name if found else None
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return {"answers": answers}


def choose_each(folders: list[str]) -> list[dict[str, Any]]:
    """`choose` for several run folders in one launch."""
    return [choose(folder) for folder in folders]


def poisoned(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case: a loss that is NaN on the last rank alone; what every rank decided, and whether anything changed."""
    results = []
    grid = start(1)
    for changes in cases:
        config = config_with(ADAM | changes)
        engine = Engine(config, plan_batches(config, dist.get_world_size()), build_model(config, grid), grid)
        one_step(engine, 1)
        before = held_out_loss(engine)
        inputs, targets = (part[grid.data_rank :: grid.data_size] for part in batch(config, 2))
        loss = LanguageModelling.loss(engine.forward, inputs, targets)
        engine.backward(loss * (torch.nan if grid.data_rank == grid.data_size - 1 else 1.0), 100)
        outcome = engine.step(config.optimizer.lr)
        assert outcome is not None
        after, again = held_out_loss(engine), one_step(engine, 3)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            answers, [outcome.skipped, before == after, again["skipped"], torch.tensor(again["loss"]).isfinite().item()]
        )
        results.append({"changes": changes, "answers": answers})
    return results
