"""Load a model from whatever a person points at: an export, a run, or a checkpoint."""

from pathlib import Path

from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import FORMAT, PlainModel, read_config


def load_model(path: str | Path, *, device: str = "cpu") -> PlainModel:
    """The plain model at `path`. Raises CheckpointError, in one line, where there is none or it is damaged."""
    folder = Path(path)
    try:
        if is_export(folder):
            return PlainModel.from_folder(folder, device=device)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return load_plain_model(open_checkpoint(folder)).to(device)


def is_export(folder: Path) -> bool:
    """Whether the folder says that it is an export; a run has a config.json too, of another format."""
    try:
        return read_config(folder)["format"] == FORMAT
    except ValueError:
        return False
