"""Write an export: weights in one of three formats, config, tokenizer, model card; there by rename, or not at all.

Memory, beyond a constant: one tensor for the safetensors formats, the model (one file) for PyTorch's.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spa_dist.errors import CheckpointError
from spa_dist.export.card import model_card
from spa_dist.export.checkpoint import Checkpoint, verify_file
from spa_dist.export.convert import folded, plain_config, plain_shapes, plain_tensor
from spa_dist.export.learned import learned_parts
from spa_dist.export.manifest import Manifest
from spa_dist.export.model import FORMAT, PlainConfig, read_config
from spa_dist.export.tensor_file import TensorSpec, write_tensor_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("pytorch", "safetensors", "huggingface")
TOKENIZER_FILE = "tokenizer.model"
DEFAULT_SHARD_BYTES = 5_000_000_000
_HUGGING_FACE = {
    "model_type": "spa",
    "architectures": ["SPAForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_spa.SPAConfig", "AutoModelForCausalLM": "modeling_spa.SPAForCausalLM"},
}
_HUGGING_FACE_CODE = ("configuration_spa.py", "modeling_spa.py", "model.py")
_EXPORT_FILE = re.compile(
    r"README\.md|(generation_)?config\.json|tokenizer\.model|model\.pt|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|(configuration_spa|modeling_spa|model)\.py"
)


@dataclass(frozen=True)
class ExportOptions:
    """What to write. max_shard_bytes bounds each safetensors file (None: 5 GB), except that a tensor is never cut."""

    file_format: str = "pytorch"
    fold: bool = True
    dtype: torch.dtype = torch.float32
    max_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.file_format not in FORMATS:
            raise ValueError(f"file_format={self.file_format!r} is not one of {', '.join(FORMATS)}")
        if self.file_format == "pytorch" and self.max_shard_bytes is not None:
            raise ValueError("max_shard_bytes has no effect on the pytorch format, which is one file")


def write_export(checkpoint: Checkpoint, output: Path, options: ExportOptions, *, force: bool = False) -> dict[str, int]:
    """Write the folder `output`, which appears when it is whole; returns name → bytes of each file.

    Raises CheckpointError: the output is in the way (force replaces an export, nothing else) or cannot be written, or the
    checkpoint or its tokenizer is damaged.
    """
    output = output.resolve()
    _check_free(output, force)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint, options)
        _move_into_place(temporary, output)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {path.name: path.stat().st_size for path in sorted(output.iterdir())}


def _check_free(output: Path, force: bool) -> None:
    """Raise CheckpointError unless nothing is at `output`, or force may replace it: an export, with nothing else in it."""
    if not output.exists():
        return
    if not force:
        raise CheckpointError(f"{output} is there already: add --force to replace it, or choose another --output")
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else [output.name]
    foreign = next((name for name in names if not _EXPORT_FILE.fullmatch(name) or not (output / name).is_file()), None)
    if foreign is not None:
        raise CheckpointError(
            f"{output} holds {foreign!r}, which is no part of an export, and --force would delete it: choose another --output"
        )
    try:
        if names:
            read_config(output)
    except ValueError:
        raise CheckpointError(
            f"{output} is not an export, and --force replaces only exports: choose another --output"
        ) from None


def _move_into_place(temporary: Path, output: Path) -> None:
    replaced = temporary.with_suffix(".replaced")
    if output.exists():
        output.rename(replaced)
    temporary.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, checkpoint: Checkpoint, options: ExportOptions) -> None:
    kept = plain_config(checkpoint.manifest)
    config = folded(kept) if options.fold else kept
    learned = learned_parts(checkpoint.manifest)
    hugging_face = options.file_format == "huggingface"

    def tensor(name: str) -> Tensor:
        return plain_tensor(name, checkpoint.tensor, kept, fold=options.fold, dtype=options.dtype, learned=learned)

    specs = [TensorSpec(name, shape, options.dtype) for name, shape in plain_shapes(config).items()]
    if options.file_format == "pytorch":
        _write_pytorch(folder / "model.pt", specs, tensor)
    else:
        prefix = "model." if hugging_face else ""
        _write_safetensors(folder, specs, tensor, options.max_shard_bytes or DEFAULT_SHARD_BYTES, prefix)
    _copy_tokenizer(checkpoint.manifest, folder)
    _write_json(folder / "config.json", _config_tree(checkpoint.manifest, config, options))
    _write_bytes(folder / "README.md", model_card(checkpoint.manifest, config, options.file_format).encode())
    if hugging_face:
        _write_json(folder / "generation_config.json", {"eos_token_id": config.eos_id, "pad_token_id": config.eos_id})
        for name in _HUGGING_FACE_CODE:
            _write_bytes(folder / name, Path(__file__).with_name(name).read_bytes())


def _config_tree(manifest: Manifest, config: PlainConfig, options: ExportOptions) -> dict[str, Any]:
    tree: dict[str, Any] = {"format": FORMAT} | asdict(config)
    if options.file_format == "huggingface":
        tree |= _HUGGING_FACE
    tree["dtype"] = str(options.dtype).removeprefix("torch.")
    tree["tokenizer"] = {"file": TOKENIZER_FILE, "sha256": manifest.tokenizer["sha256"]}
    tree["training"] = {"step": manifest.step, "tokens": manifest.tokens, "config": manifest.config}
    return tree


def _write_pytorch(path: Path, specs: list[TensorSpec], tensor: Any) -> None:
    # Largest first: what a cut, a fold or a cast holds twice for a moment is held while little else is.
    state = {spec.name: _own(tensor(spec.name)) for spec in sorted(specs, key=lambda spec: -spec.nbytes)}
    try:
        with path.open("wb") as file:
            torch.save({spec.name: state[spec.name] for spec in specs}, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's own report of a disk that is full
        raise OSError(str(error).splitlines()[0]) from None


def _own(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own size: torch.save writes whole storages."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _write_safetensors(folder: Path, specs: list[TensorSpec], tensor: Any, limit: int, prefix: str) -> None:
    shards = list(_shards(specs, limit))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        many = len(shards) > 1
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        named = [TensorSpec(prefix + spec.name, spec.shape, spec.dtype) for spec in shard]
        write_tensor_file(folder / name, named, (tensor(spec.name) for spec in shard), {"format": "pt"})
        weight_map |= {spec.name: name for spec in named}
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(specs: Iterable[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors, as many as fit into `limit` bytes, at least one."""
    shard: list[TensorSpec] = []
    for spec in specs:
        if shard and sum(each.nbytes for each in shard) + spec.nbytes > limit:
            yield shard
            shard = []
        shard.append(spec)
    yield shard


def _copy_tokenizer(manifest: Manifest, folder: Path) -> None:
    source = tokenizer_of(manifest)
    if source is None:
        raise CheckpointError(f"{manifest.tokenizer['file']} is missing from the run's folder: copy it beside checkpoints/")
    verify_file(source, None, manifest.tokenizer["sha256"])
    _write_bytes(folder / TOKENIZER_FILE, source.read_bytes())


def tokenizer_of(manifest: Manifest) -> Path | None:
    """The tokenizer's file: in the checkpoint's folder, beside it, or in the run's folder."""
    folder = manifest.folder.absolute()
    places = [place / manifest.tokenizer["file"] for place in (folder, *list(folder.parents)[:2])]
    return next((place for place in places if place.is_file()), None)


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    _write_bytes(path, (json.dumps(tree, indent=2) + "\n").encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
