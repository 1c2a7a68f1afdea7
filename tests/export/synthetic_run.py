"""Runs with random weights, written as a trainer of any tensor-parallel × data-parallel size would write them.

Splitting is done here by plain slicing, so that the reader's joining is checked against something else. Rows that pad the
vocabulary hold huge values: one that gets into an export cannot be overlooked.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from spa_dist.attention import make_projection
from spa_dist.config import Config, config_from_dict
from spa_dist.parallel.layout import parameter_layout

PADDING = 1e6
TREE: dict[str, Any] = {
    "run": {"steps": 10, "seed": 5, "name": "synthetic"},
    "model": {
        "num_layers": 2, "hidden_size": 24, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "value_dim": 6,
        "ffn_hidden_size": 48, "sequence_length": 32, "vocab_size": 61, "vocab_multiple": 16,
    },
    "attention": {"d_proj": 4, "sparsity": 0.5},
}  # fmt: skip


@dataclass
class Run:
    """A written run, and the full tensors that it was written from."""

    folder: Path
    config: Config
    tensors: dict[str, Tensor]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "step_00000010"

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.checkpoint / "manifest.json").read_text())

    def change_manifest(self, tree: Any) -> None:
        (self.checkpoint / "manifest.json").write_text(json.dumps(tree))

    def commit(self) -> None:
        """Make the manifest agree with the files that are there now, damaged or not."""
        tree = self.manifest()
        tree["files"] = {path.name: facts(path) for path in self.checkpoint.glob("*.safetensors")}
        self.change_manifest(tree)


def make_run(folder: Path, changes: dict[str, Any] | None = None, *, tensor: int = 1, data: int = 1, seed: int = 0) -> Run:
    """Write a run of one checkpoint, step 10, whose config is TREE with `section.key` changes."""
    config = config_with(changes or {})
    tensors = random_tensors(config, seed)
    run = Run(folder, config, tensors)
    run.checkpoint.mkdir(parents=True)
    tokenizer = folder / "tokenizer.model"
    tokenizer.write_bytes(b"a tokenizer")
    layout = {name: entry.as_json() for name, entry in parameter_layout(config).items()}
    for tensor_rank in range(tensor):
        parts = {name: split(full, layout[name]["dim"], tensor_rank, tensor) for name, full in tensors.items()}
        for data_rank in range(data):
            write_rank(run.checkpoint, parts, layout, (tensor_rank, data_rank), data)
    run.change_manifest(
        {
            "format": "spa_dist.checkpoint/1",
            "step": 10,
            "tokens": 1000,
            "cursor": 100,
            "parallel": {"tensor": tensor, "data": data, "zero_stage": 3},
            "config": config.model_dump(mode="json"),
            "layout": layout,
            "files": {},
            "tokenizer": {"file": "tokenizer.model", "sha256": facts(tokenizer)["sha256"], "eos_id": 1, "vocab_size": 61},
            "state": {"validation_loss": 4.0},
            "versions": {"spa_dist": "0.1.0"},
        }
    )
    run.commit()
    return run


def config_with(changes: dict[str, Any]) -> Config:
    tree = json.loads(json.dumps(TREE))
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        tree.setdefault(section, {})[key] = value
    return config_from_dict(tree)


def random_tensors(config: Config, seed: int) -> dict[str, Tensor]:
    """Every tensor of the layout table with values of its own, none of them constant."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in parameter_layout(config).items():
        values = torch.randn(entry.shape, generator=generator)
        if name.endswith("projection"):
            attention = config.attention
            options = {"block": (2, 2)} if attention.pattern == "block" else {}
            values = make_projection(
                attention.pattern,
                *entry.shape[1:],
                num_heads=entry.shape[0],
                sparsity=0.5,
                seed=seed + len(tensors),
                **options,
            )
        elif "norm" in name and name.endswith("weight"):
            values = 1.0 + 0.3 * values
        elif entry.kind == "vocabulary":
            values = values / 2  # logits of about ten, as a trained model's: fp32 rounding grows with them
            values[config.model.vocab_size :] = PADDING
        else:
            values = values / entry.shape[-1] ** 0.5
        tensors[name] = values
    return tensors


def split(full: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    if dim is None:
        return full
    width = full.shape[dim] // size
    return full[rank * width : (rank + 1) * width] if dim == 0 else full[:, rank * width : (rank + 1) * width]


def write_rank(folder: Path, parts: dict[str, Tensor], layout: dict[str, Any], rank: tuple[int, int], data: int) -> None:
    """This rank's fragments: cut at uneven places, as flat optimizer partitions are; buffers whole from the first rank."""
    tensor_rank, data_rank = rank
    own, places = {}, {}
    for number, (name, part) in enumerate(parts.items()):
        flat = part.reshape(-1)
        cuts = [len(flat) * (3 * d + number % 3) // (3 * data) for d in range(data)] + [len(flat)]
        start, stop = (0 if data_rank == 0 else cuts[data_rank]), cuts[data_rank + 1]
        if layout[name]["buffer"]:
            start, stop = (0, len(flat)) if data_rank == 0 else (0, 0)
        if start < stop:
            own[name], places[name] = flat[start:stop].clone(), (start, stop - start)
    path = folder / f"weights-tp{tensor_rank:02d}-dp{data_rank:03d}.safetensors"
    safetensors.torch.save_file(own, path, metadata={"fragments": json.dumps(places)})


def facts(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
