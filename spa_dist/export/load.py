"""Load a model from whatever a person points at: an export, a run, or a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from spa_dist.errors import CheckpointError, ConfigError
from spa_dist.export.checkpoint import Checkpoint, open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.manifest import find_checkpoint
from spa_dist.export.model import FORMAT, PlainModel, read_config
from spa_dist.export.write import TOKENIZER_FILE, tokenizer_of


@dataclass(frozen=True)
class LoadedModel:
    """A plain model, with the tokenizer that it was trained with: its file, if it is there, and its SHA-256, if known."""

    model: PlainModel
    tokenizer: Path | None
    tokenizer_sha256: str | None


def load_model(path: str | Path, *, device: str = "cpu") -> LoadedModel:
    """The model at `path`; a checkpoint is merged in memory. Raises CheckpointError, in one line, where there is none, and
    ConfigError for a device that this machine lacks."""
    _check_device(device)
    folder = Path(path)
    try:
        if not is_export(folder):
            checkpoint = _checkpoint(folder)
            plain, manifest = load_plain_model(checkpoint).to(device), checkpoint.manifest
            return LoadedModel(plain, tokenizer_of(manifest), manifest.tokenizer["sha256"])
        model = PlainModel.from_folder(folder, device=device)
        tokenizer = read_config(folder).get("tokenizer")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    digest = tokenizer.get("sha256") if isinstance(tokenizer, dict) else None
    file = folder / TOKENIZER_FILE
    return LoadedModel(model, file if file.is_file() else None, digest)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        raise ConfigError(
            f"device {device!r} cannot be used here ({reason}): take cpu, or cuda where there is a GPU"
        ) from None


def _checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint that `folder` means; a folder with a config.json and no checkpoint is an export that is damaged."""
    try:
        found = find_checkpoint(folder)
    except CheckpointError:
        if (folder / "config.json").exists() and not (folder / "checkpoints").exists():
            read_config(folder)
        raise
    return open_checkpoint(found)


def is_export(folder: Path) -> bool:
    """Whether the folder says that it is an export; a run has a config.json too, of another format."""
    try:
        return read_config(folder)["format"] == FORMAT
    except ValueError:
        return False
