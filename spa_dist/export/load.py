"""Load a model from whatever a person points at: an export, a run, or a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import FORMAT, PlainModel, read_config
from spa_dist.export.write import TOKENIZER_FILE, tokenizer_of


@dataclass(frozen=True)
class LoadedModel:
    """A plain model, with the tokenizer that it was trained with: its file, if it is there, and its SHA-256, if known."""

    model: PlainModel
    tokenizer: Path | None
    tokenizer_sha256: str | None


def load_model(path: str | Path, *, device: str = "cpu") -> LoadedModel:
    """The model at `path`; a checkpoint is merged in memory. Raises CheckpointError, in one line, where there is none."""
    folder = Path(path)
    if not is_export(folder):
        checkpoint = open_checkpoint(folder)
        manifest = checkpoint.manifest
        return LoadedModel(load_plain_model(checkpoint).to(device), tokenizer_of(manifest), manifest.tokenizer["sha256"])
    try:
        model = PlainModel.from_folder(folder, device=device)
        tokenizer = read_config(folder).get("tokenizer")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    digest = tokenizer.get("sha256") if isinstance(tokenizer, dict) else None
    file = folder / TOKENIZER_FILE
    return LoadedModel(model, file if file.is_file() else None, digest)


def is_export(folder: Path) -> bool:
    """Whether the folder says that it is an export; a run has a config.json too, of another format."""
    try:
        return read_config(folder)["format"] == FORMAT
    except ValueError:
        return False
