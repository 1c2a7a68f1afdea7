"""Task 1: a small language model, trained by the project's own trainer, once for each job.

Every variant sees the same tokens in the same order (the seed's). 4 layers × 128, 4 heads, d_k = 64, d_v = 32, N = 256: 1.2 million
parameters with dense attention and a vocabulary of 2048.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from data_pipeline.dataset import Dataset
from spa_dist.comparison.jobs import Job
from spa_dist.config import Config, config_from_dict, with_vocabulary

HEAD_DIM = 64
WIDTHS = (16, 8)
"""d_k′: d_k/4 and d_k/8."""
STEPS = 480
BATCH = 4
"""Sequences of a step."""
SEQUENCES = 128
"""Of the validation split, spread evenly over it; the same for every run."""
SETTINGS: dict[str, Any] = {"every": 40, "l0_lambda": {"gumbel": 0.012, "l0": 0.018}}
"""Steps between mask updates, and the λ at which the density ends near 20 %."""
LEARNING_RATE = 1.5e-3
FIRST_SEED = 1234


def settings(dataset: Dataset, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> dict[str, Any]:
    """What, besides the job, decides a run's result; a result is reused only where these are the same."""
    train = dataset.split("train")
    data = {"tokenizer_sha256": dataset.index.tokenizer_sha256, "train_tokens": train.tokens}
    sizes = {"steps": steps, "batch": BATCH, "sequences": SEQUENCES, "learning_rate": learning_rate}
    return {**sizes, "data": data, **SETTINGS}


def run_config(job: Job, settings: dict[str, Any], data: Path, folder: Path) -> Config:
    """The resolved config of a job."""
    steps = settings["steps"]
    return config_from_dict(
        {
            "run": {"name": job.name, "dir": str(folder), "steps": steps, "seed": FIRST_SEED + job.seed, "device": "cpu"},
            "model": {
                "num_layers": 4,
                "hidden_size": 128,
                "num_heads": 4,
                "head_dim": HEAD_DIM,
                "value_dim": 32,
                "sequence_length": 256,
            },
            "attention": job.definition().attention(job.d_proj or HEAD_DIM, settings),
            "batch": {"global_size": settings["batch"]},
            "data": {"path": str(data)},
            "optimizer": {"lr": settings["learning_rate"]},
            "schedule": {"name": "cosine", "warmup_steps": steps // 10, "min_ratio": 0.1},
            "checkpoint": {"every": 0},
            "logging": {"every": max(1, steps // 40), "tensorboard": False, "progress": False},
            "evaluation": {
                "every": steps,
                "sequences": settings["sequences"],
                "micro_size": 8,
                "patience": None,
            },
        }
    )


def run(job: Job, settings: dict[str, Any], data: Path) -> dict[str, Any]:
    """Train and evaluate one job in this process; the run's own files go when it is done."""
    from spa_dist.parallel.groups import Launch
    from spa_dist.training.callbacks.metrics import read_metrics
    from spa_dist.training.run import train

    with tempfile.TemporaryDirectory() as folder:
        config = run_config(job, settings, data, Path(folder) / "run")
        began = time.perf_counter()
        code = train(config, Launch(0, 0, 1), resume=False)
        seconds = time.perf_counter() - began
        if code:
            raise SystemExit(code)
        return summary(config, data, read_metrics(Path(folder) / "run" / "metrics.jsonl")) | {"seconds": seconds}


def summary(config: Config, data: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run's log and config say, in the form that tables read."""
    from data_pipeline.dataset import open_dataset

    config = with_vocabulary(config, open_dataset(data).vocab_size)
    evaluations = [line for line in lines if "validation_loss" in line]
    masks = [line for line in lines if "mask_density" in line or "mask_gates" in line]
    keys = ("step", "tokens", "validation_loss")
    final = {
        key.removeprefix("validation_"): value for key, value in evaluations[-1].items() if key.startswith("validation")
    }
    final["training_loss"] = [line["loss"] for line in lines if "loss" in line][-1]
    if masks:
        final |= {key: masks[-1][key] for key in MASK_KEYS if key in masks[-1]}
    final["mask_faults"] = sum(line["mask_faults"] for line in masks)
    tree = config.model_dump(mode="json")
    tree["run"].pop("dir")
    tree["data"].pop("path")  # both are of one machine
    return {
        "config": tree,
        **costs(config),
        "curve": [{key: line[key] for key in keys} for line in evaluations],
        "final": final,
    }


MASK_KEYS = ("mask_density", "mask_effective_rank", "mask_rank", "mask_empty_rows", "mask_gates", "mask_open_probability")


def costs(config: Config) -> dict[str, Any]:
    """Parameters, operations and cache of a model.

    `parameters` are those that train; `folded_parameters` what is left of them when S and the gate are folded away.
    """
    from spa_dist.model.flops import effective_width, forward_flops_per_token, training_flops_per_token

    model = config.model
    assert model.num_kv_heads and model.value_dim
    kind = "dense" if config.attention.kind == "dense" else "thin"
    plain = config.attention.model_copy(update={"kind": kind, "gate": False, "mask": None, "pattern": "random"})
    return {
        "parameters": trained_parameters(config),
        "folded_parameters": trained_parameters(config.model_copy(update={"attention": plain})),
        "forward_flops_per_token": forward_flops_per_token(config),
        "training_flops_per_token": training_flops_per_token(config),
        "cache_numbers_per_token": model.num_layers * model.num_kv_heads * (effective_width(config) + model.value_dim),
    }


def trained_parameters(config: Config) -> int:
    """Numbers that the optimizer moves."""
    from math import prod

    from spa_dist.parallel.layout import parameter_layout

    return sum(prod(entry.shape) for entry in parameter_layout(config).values() if not entry.buffer)
