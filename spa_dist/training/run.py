"""A whole training run: from a config to its files."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.dataset import Dataset, check_tokenizer, open_dataset
from data_pipeline.stream import EvalStream, TrainStream
from spa_dist.cli import EXIT_INTERRUPTED, EXIT_OK
from spa_dist.config import BatchPlan, Config, plan_batches, with_vocabulary
from spa_dist.errors import CheckpointError
from spa_dist.model import build_model
from spa_dist.model.build import check_start
from spa_dist.parallel.groups import Grid, Launch, start_process_groups, stop_process_groups
from spa_dist.tasks import LanguageModelling
from spa_dist.training.callbacks import Callback, Checkpointing, Evaluation, MaskTraining, MetricsLog, Progress, TensorBoard
from spa_dist.training.checkpoint.find import newest_good_checkpoint
from spa_dist.training.checkpoint.read import Checkpoint
from spa_dist.training.checkpoint.restore import check_same_model, load_optimizer, load_weights, restored_state
from spa_dist.training.engine import Engine
from spa_dist.training.hardware import choose_device
from spa_dist.training.plan import describe
from spa_dist.training.signals import StopRequest
from spa_dist.training.state import TrainState
from spa_dist.training.trainer import Trainer

logger = logging.getLogger(__name__)
TOKENIZER_FILE = "tokenizer.model"
DEFAULT_VOCABULARY = 32_000


def prepare_run(config: Config, launch: Launch) -> tuple[Config, BatchPlan, Dataset]:
    """Everything that can be found wrong before a process group exists: batch arithmetic, device, data, tokenizer."""
    plan = plan_batches(config, launch.world_size)
    choose_device(config, launch.local_rank)
    check_start(config)
    dataset = open_dataset(config.data.path)
    check_tokenizer(dataset)
    config = with_vocabulary(config, dataset.vocab_size)
    for split in ("train", config.evaluation.split):
        dataset.split(split)
    TrainStream(dataset, sequence_length=1, seed=0, data_rank=0, data_size=plan.data_parallel_size, workers=0)
    return config, plan, dataset


def dry_run(config: Config, launch: Launch) -> str:
    """Check everything a run needs, build one mock batch, and say what would run. No process group is made.

    Without a dataset the plan takes the vocabulary of the config, or 32,000, and a made-up batch.
    """
    plan = plan_batches(config, launch.world_size)
    device = choose_device(config, launch.local_rank)
    length = config.model.sequence_length
    if Path(config.data.path).exists():
        config, plan, dataset = prepare_run(config, launch)
        stream = TrainStream(
            dataset, sequence_length=length, seed=config.run.seed, data_size=plan.data_parallel_size, workers=0
        )
        inputs, targets = stream.batch(0, plan.micro_size * plan.data_parallel_size)
        content = dataset.split("train")
        epochs = plan.steps * plan.global_size / stream.epoch_samples
        data = f"{config.data.path}: {content.tokens:,} training tokens in {len(content.shards)} shards; {epochs:.2f} epochs"
    else:
        vocabulary = config.model.vocab_size or DEFAULT_VOCABULARY
        config = with_vocabulary(config, vocabulary)
        inputs = np.random.default_rng(config.run.seed).integers(vocabulary, size=(plan.micro_size, length))
        targets = inputs
        data = f"{config.data.path} is not prepared yet; a vocabulary of {vocabulary:,} is assumed"
    valid = LanguageModelling.valid_targets(torch.from_numpy(targets))
    batch = f"one micro-batch {list(inputs.shape)} {inputs.dtype}, {valid:,} targets"
    return describe(config, plan, str(device.type), data, batch)


def train(config: Config, launch: Launch, *, resume: bool, callbacks: Sequence[Callback] = ()) -> int:
    """Train, evaluate, checkpoint; returns the command's exit code. Run by every process of the launch.

    `callbacks` run after the run's own, so that they see each step evaluated and checkpointed.
    """
    config, plan, dataset = prepare_run(config, launch)
    run_dir = Path(config.run_dir)
    if not resume:
        _refuse_to_overwrite(run_dir)
    stop_request = StopRequest()
    stop_request.listen()
    device = choose_device(config, launch.local_rank)
    grid = start_process_groups(launch, device, config.parallel.tensor, config.parallel.timeout_minutes)
    checkpoint = newest_good_checkpoint(run_dir) if resume else None
    if grid.is_first:
        _write_run_files(run_dir, config, dataset)
    engine, state = _build(config, plan, grid, checkpoint)
    reason = _train(config, plan, grid, dataset, engine, state, stop_request, callbacks)
    if grid.is_first:
        logger.info("%s at step %d; files in %s", reason, state.step, run_dir)
    stop_process_groups()
    return EXIT_INTERRUPTED if reason == "interrupted" else EXIT_OK


def _refuse_to_overwrite(run_dir: Path) -> None:
    if any((run_dir / "checkpoints").glob("step_*")):
        raise CheckpointError(
            f"{run_dir} already holds checkpoints: go on from them with --resume auto, or set another run.dir or run.name"
        )


def _build(config: Config, plan: BatchPlan, grid: Grid, checkpoint: Checkpoint | None) -> tuple[Engine, TrainState]:
    model = build_model(config, grid)
    if checkpoint is None:
        return Engine(config, plan, model, grid), TrainState()
    check_same_model(config, checkpoint)
    load_weights(model, checkpoint, config, grid)
    engine = Engine(config, plan, model, grid)
    load_optimizer(engine, checkpoint)
    if grid.is_first:
        logger.info("resumed from %s", checkpoint.folder)
    return engine, restored_state(checkpoint)


def _train(
    config: Config,
    plan: BatchPlan,
    grid: Grid,
    dataset: Dataset,
    engine: Engine,
    state: TrainState,
    stop: StopRequest,
    further: Sequence[Callback],
) -> str:
    run_dir = Path(config.run_dir)
    place: dict[str, Any] = {
        "sequence_length": config.model.sequence_length,
        "data_rank": grid.data_rank,
        "data_size": grid.data_size,
    }
    stream = TrainStream(dataset, seed=config.run.seed, workers=config.data.workers, **place)
    held_out = EvalStream(dataset, config.evaluation.split, limit=config.evaluation.sequences, **place)
    log = MetricsLog(run_dir / "metrics.jsonl")
    tensorboard = TensorBoard(run_dir / "tensorboard", log) if config.logging.tensorboard else None
    callbacks = [
        log,
        *([tensorboard] if tensorboard else []),
        *([Progress(log)] if config.logging.progress else []),
        *([MaskTraining(config, log, tensorboard)] if MaskTraining.wanted(config) else []),
        Evaluation(held_out, log),
        Checkpointing(run_dir, _tokenizer_facts(dataset), resumed_at=state.step),
        *further,
    ]
    batches = stream.micro_batches(state.cursor, global_size=plan.global_size, micro_size=plan.micro_size)
    try:
        trainer = Trainer(
            config, plan, grid, engine, LanguageModelling(), batches, stream.epoch_samples, state, callbacks, stop
        )
        return trainer.run()
    finally:
        batches.close()


def _tokenizer_facts(dataset: Dataset) -> dict[str, str | int]:
    index = dataset.index
    return {
        "file": TOKENIZER_FILE,
        "sha256": index.tokenizer_sha256,
        "eos_id": index.eos_id,
        "vocab_size": index.vocab_size,
    }


def _write_run_files(run_dir: Path, config: Config, dataset: Dataset) -> None:
    """The resolved config and the tokenizer, so that the run's folder stands on its own."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    (run_dir / "config.json").write_text(text, encoding="utf-8")
    shutil.copyfile(dataset.tokenizer_path, run_dir / TOKENIZER_FILE)
