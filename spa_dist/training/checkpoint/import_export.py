"""The way back: a plain export → a checkpoint that training continues from, at any layout.

Only weights come back: the new run starts at step 0 with fresh optimizer state and the data from its beginning. The checkpoint
is written as by one process; the trainer's reader gives each rank its part.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spa_dist.config import Config, apply_override, config_from_dict
from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import sha256_of
from spa_dist.export.manifest import FORMAT, MANIFEST
from spa_dist.export.model import PlainConfig, PlainModel, read_config
from spa_dist.export.tensor_file import TensorSpec, write_tensor_file
from spa_dist.export.write import TOKENIZER_FILE
from spa_dist.parallel.layout import Layout, parameter_layout
from spa_dist.training.checkpoint.versions import installed_versions
from spa_dist.training.state import TrainState

_WEIGHTS = "weights-tp00-dp000.safetensors"


def import_export(export: Path, run_dir: Path, overrides: Sequence[str] = ()) -> Path:
    """Make a run in `run_dir` whose step 0 is the export; returns the checkpoint's folder.

    The config is the one that the export was trained with, with `section.key=value` overrides and the run's new folder. An
    export whose S was folded in comes back as kind "thin", which is what folding made of it: the same function, no S.
    Memory, beyond a constant: one tensor, and pages of the export's file that the system may drop.

    Raises CheckpointError (ConfigError for an override), in one line: there is no export, it is damaged, it does not fit the
    config, or run_dir already holds a run.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise CheckpointError(f"{run_dir} is not empty: choose another --output")
    try:
        tree = read_config(export)
        plain = PlainConfig.from_dict(tree)
        model = PlainModel.from_folder(export)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    config = _training_config(export, tree, plain, run_dir, overrides)
    layout = parameter_layout(config)
    weights = model.state_dict()
    _check_shapes(export, layout, weights)
    tokenizer = _tokenizer_facts(export, tree, plain)
    temporary = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.partial")
    folder = Path("checkpoints") / "step_00000000"
    try:
        (temporary / folder).mkdir(parents=True)
        _write_weights(temporary / folder / _WEIGHTS, layout, _restored(weights, plain))
        manifest = _manifest(config, layout, temporary / folder / _WEIGHTS, tokenizer)
        _write_json(temporary / folder / MANIFEST, manifest)
        _write_json(temporary / "config.json", manifest["config"])
        shutil.copyfile(export / TOKENIZER_FILE, temporary / TOKENIZER_FILE)
        if run_dir.exists():
            run_dir.rmdir()
        temporary.rename(run_dir)
    except OSError as error:
        raise CheckpointError(f"{run_dir} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return run_dir / folder


def _training_config(
    export: Path, tree: dict[str, Any], plain: PlainConfig, run_dir: Path, overrides: Sequence[str]
) -> Config:
    try:
        config = json.loads(json.dumps(tree["training"]["config"]))
        attention, run = config["attention"], config["run"]
        kind = attention["kind"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{export}/config.json does not hold the config of its training run") from None
    if kind == "spa" and not plain.num_projections:
        config["attention"] = {"kind": "thin"} | {
            key: attention[key] for key in ("d_proj", "qk_norm", "backend") if key in attention
        }
    elif attention.get("pattern") in ("learned", "adaptive"):
        # The mask was applied: what is left is an S of the pattern that it started from, whose non-zeros go on being trained.
        attention |= {"pattern": attention["mask"]["start"], "mask": None, "trainable": True}
    config["attention"].pop("gate", None)  # multiplied into the queries
    run["dir"] = str(run_dir)
    for override in overrides:
        apply_override(config, override)
    return config_from_dict(config)


def _check_shapes(export: Path, layout: Layout, weights: dict[str, Tensor]) -> None:
    for name in sorted(layout.keys() ^ weights.keys()):
        holder, other = ("the export", "the config's model") if name in weights else ("the config's model", "the export")
        raise CheckpointError(f"{holder} has {name}, and {other} has not: {export} does not fit the config")
    for name, entry in layout.items():
        shape = tuple(weights[name].shape)
        padded = entry.kind == "vocabulary" and entry.shape[0] >= shape[0] and entry.shape[1:] == shape[1:]
        if shape != entry.shape and not padded:
            raise CheckpointError(f"{name} is {list(shape)} in {export} and {list(entry.shape)} in the config's model")


def _restored(weights: dict[str, Tensor], plain: PlainConfig) -> Callable[[str], Tensor]:
    """Gives a weight, fp32. Trained without S, a model has the scale 1/√d_qk: another one goes into the queries."""
    factor = 1.0 if plain.num_projections else plain.logit_scale * math.sqrt(plain.query_key_width)
    scaled = ".attention.query_norm." if plain.qk_norm else ".attention.query."
    exact = math.isclose(factor, 1.0, rel_tol=1e-12)

    def weight(name: str) -> Tensor:
        tensor = weights[name].float()
        return tensor if exact or scaled not in name else (tensor.double() * factor).float()

    return weight


def _write_weights(path: Path, layout: Layout, weight: Callable[[str], Tensor]) -> None:
    def flat(name: str) -> Tensor:
        full = torch.zeros(layout[name].shape)  # rows beyond the vocabulary take no part in anything
        tensor = weight(name)
        full[: len(tensor)] = tensor
        return full.view(-1)

    numels = {name: math.prod(entry.shape) for name, entry in layout.items()}
    specs = [TensorSpec(name, (numel,), torch.float32) for name, numel in numels.items()]
    fragments = json.dumps({name: [0, numel] for name, numel in numels.items()})
    write_tensor_file(path, specs, (flat(name) for name in layout), {"fragments": fragments})


def _tokenizer_facts(export: Path, tree: dict[str, Any], plain: PlainConfig) -> dict[str, Any]:
    path = export / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: copy the tokenizer that the model was trained with there")
    digest = sha256_of(path)
    if digest != tree.get("tokenizer", {}).get("sha256"):
        raise CheckpointError(f"{path} is not the tokenizer that the export names in its config.json")
    return {"file": TOKENIZER_FILE, "sha256": digest, "eos_id": plain.eos_id, "vocab_size": plain.vocab_size}


def _manifest(config: Config, layout: Layout, weights: Path, tokenizer: dict[str, Any]) -> dict[str, Any]:
    state = TrainState()
    return {
        "format": FORMAT,
        "step": state.step,
        "tokens": state.tokens,
        "cursor": state.cursor,
        "parallel": {"tensor": 1, "data": 1, "zero_stage": 0},
        "state": state.as_json() | {"optimizer_steps": 0, "loss_scaler": {}},
        "tokenizer": tokenizer,
        "config": config.model_dump(mode="json"),
        "layout": {name: entry.as_json() for name, entry in layout.items()},
        "files": {weights.name: {"bytes": weights.stat().st_size, "sha256": sha256_of(weights)}},
        "versions": installed_versions(),
    }


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
