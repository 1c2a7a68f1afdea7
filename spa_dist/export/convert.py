"""A training checkpoint of any layout → the plain model's config and weights, and the folder that holds them."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spa_dist.attention import fold_projection, logit_scale, query_key_width
from spa_dist.errors import CheckpointError
from spa_dist.export.card import model_card
from spa_dist.export.checkpoint import Checkpoint, sha256_of
from spa_dist.export.model import FORMAT, PlainConfig, PlainModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("pytorch", "safetensors")


def plain_config(checkpoint: Checkpoint, *, fold: bool) -> PlainConfig:
    """The plain model's architecture, from the config that the checkpoint was trained with."""
    model, attention = checkpoint.manifest.config["model"], checkpoint.manifest.config["attention"]
    kind, d_k, d_proj = attention["kind"], model["head_dim"], attention["d_proj"]
    width = query_key_width(kind, d_k, d_proj)
    kept = kind == "spa" and not fold
    projection = checkpoint.manifest.layout.get("layers.0.attention.projection")
    return PlainConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        num_layers=model["num_layers"],
        num_heads=model["num_heads"],
        num_kv_heads=model["num_kv_heads"],
        head_dim=d_k if kept else width,
        query_key_width=width,
        value_dim=model["value_dim"],
        ffn_hidden_size=model["ffn_hidden_size"],
        sequence_length=model["sequence_length"],
        positions=model["positions"],
        rope_theta=model["rope_theta"],
        tie_embeddings=model["tie_embeddings"],
        norm=model["norm"],
        norm_eps=model["norm_eps"],
        bias=model["bias"],
        qk_norm=attention["qk_norm"],
        logit_scale=logit_scale(attention["scale"] if kind == "spa" else "paper", d_k, width),
        num_projections=projection.shape[0] if kept and projection else 0,
        eos_id=checkpoint.manifest.tokenizer["eos_id"],
    )


def plain_weights(checkpoint: Checkpoint, config: PlainConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor of each weight of the plain model, one at a time.

    The vocabulary's padding is cut off; S is multiplied into queries and keys in float64, unless the config keeps it.
    """
    fold = config.num_projections == 0
    for name in checkpoint.manifest.layout:
        if name.endswith("attention.projection") and fold:
            continue
        tensor = checkpoint.tensor(name)
        if name in ("embedding.weight", "head.weight"):
            tensor = tensor[: config.vocab_size].clone()
        elif fold and (".attention.query." in name or ".attention.key." in name):
            projection = name.rsplit(".", 2)[0] + ".projection"
            if projection in checkpoint.manifest.layout:
                tensor = fold_projection(tensor.double(), checkpoint.tensor(projection).double())
        yield name, tensor.to(dtype)


def load_plain_model(checkpoint: Checkpoint, *, fold: bool = True, dtype: torch.dtype = torch.float32) -> PlainModel:
    """The plain model of a checkpoint in memory."""
    config = plain_config(checkpoint, fold=fold)
    with torch.device("meta"):
        model = PlainModel(config)
    model.load_state_dict(dict(plain_weights(checkpoint, config, dtype)), strict=True, assign=True)
    return model.eval()


def convert(
    checkpoint: Checkpoint, output: Path, *, file_format: str, fold: bool, dtype: torch.dtype, force: bool
) -> dict[str, int]:
    """Write the export folder: weights, config.json, tokenizer and model card; name → bytes of what was written.

    It appears by rename when it is whole, and nothing half-written stays behind.

    Raises:
        CheckpointError: the output is in the way or cannot be written, or the tokenizer is missing or another one.
    """
    if output.exists() and not force:
        raise CheckpointError(f"{output} is there already: add --force to replace it, or choose another --output")
    temporary = output.parent / f".{output.name}.{os.getpid()}.partial"
    config = plain_config(checkpoint, fold=fold)
    try:
        temporary.mkdir(parents=True)
        _write(temporary, checkpoint, config, file_format, dtype)
        if output.exists():
            shutil.rmtree(output)
        temporary.rename(output)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written ({error.strerror or error}): check --output") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {path.name: path.stat().st_size for path in sorted(output.iterdir())}


def _write(folder: Path, checkpoint: Checkpoint, config: PlainConfig, file_format: str, dtype: torch.dtype) -> None:
    tree: dict[str, Any] = {"format": FORMAT} | vars(config)
    tree["trained"] = {"step": checkpoint.manifest.step, "tokens": checkpoint.manifest.tokens}
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    _copy_tokenizer(checkpoint, folder)
    (folder / "README.md").write_text(model_card(checkpoint.manifest, config), encoding="utf-8")
    weights = dict(plain_weights(checkpoint, config, dtype))
    if file_format == "safetensors":
        import safetensors.torch  # the format is optional, and so is the package

        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "model.pt")


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The run's tokenizer, if it is the one that the checkpoint was trained with."""
    facts = checkpoint.manifest.tokenizer
    for candidate in (checkpoint.manifest.folder, *checkpoint.manifest.folder.parents[:2]):
        path = candidate / facts["file"]
        if path.is_file():
            if sha256_of(path) != facts["sha256"]:
                raise CheckpointError(f"{path} is not the tokenizer that the checkpoint was trained with")
            shutil.copyfile(path, folder / "tokenizer.model")
            return
    raise CheckpointError(f"{facts['file']} is missing from the run's folder: copy it beside checkpoints/")
