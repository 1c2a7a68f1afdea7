"""The way back: an export becomes a checkpoint of the same function, which the trainer's own reader gives to any layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spa_dist.config import config_from_dict
from spa_dist.errors import CheckpointError, ConfigError
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.write import ExportOptions, write_export
from spa_dist.parallel.layout import parameter_layout
from spa_dist.training.checkpoint.import_export import import_export
from spa_dist.training.checkpoint.read import Checkpoint
from spa_dist.training.checkpoint.restore import check_same_model, restored_state
from tests.export.synthetic_run import make_run

TOKENS = torch.tensor([[3, 60, 0, 17, 42, 5]])


def exported(folder: Path, changes: dict[str, Any], *, fold: bool, file_format: str = "pytorch") -> Path:
    run = make_run(folder / "run", changes, tensor=2, data=2)
    write_export(open_checkpoint(run.folder), folder / "export", ExportOptions(file_format, fold=fold))
    return folder / "export"


@pytest.mark.parametrize("file_format", ["pytorch", "safetensors", "huggingface"])
def test_unfolded_comes_back_bit_for_bit(tmp_path: Path, file_format: str) -> None:
    changes = {"model.tie_embeddings": False, "attention.per": "head", "attention.scale": "unbiased"}
    export = exported(tmp_path, changes, fold=False, file_format=file_format)
    import_export(export, tmp_path / "again")
    first, second = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "again")
    assert first.manifest.layout == second.manifest.layout
    for name in first.manifest.layout:
        rows = 61 if first.manifest.layout[name].kind == "vocabulary" else None
        assert torch.equal(first.tensor(name)[:rows], second.tensor(name)[:rows]), name


@torch.inference_mode()
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("scale", ["paper", "unbiased", 0.9])
@pytest.mark.parametrize("kind", ["spa", "dense", "thin"])
def test_folded_comes_back_as_the_same_function(tmp_path: Path, kind: str, scale: Any, qk_norm: bool) -> None:
    changes = {"attention.kind": kind, "attention.scale": scale, "attention.qk_norm": qk_norm}
    export = exported(tmp_path, changes, fold=True)
    import_export(export, tmp_path / "again")
    again = open_checkpoint(tmp_path / "again")
    assert again.manifest.config["attention"]["kind"] == ("dense" if kind == "dense" else "thin")
    before, after = (load_plain_model(open_checkpoint(tmp_path / name)) for name in ("run", "again"))
    assert torch.allclose(before(TOKENS), after(TOKENS), rtol=0, atol=1e-5)


def test_the_trainer_reads_it_at_any_size(tmp_path: Path) -> None:
    """Through the trainer's reader: each rank's part, the same model by its own check, step 0 and no optimizer state."""
    folder = import_export(exported(tmp_path, {}, fold=False), tmp_path / "again", ["optimizer.lr=0.001"])
    manifest = json.loads((folder / "manifest.json").read_text())
    config = config_from_dict(json.loads((tmp_path / "again" / "config.json").read_text()))
    assert config.optimizer.lr == 0.001 and config.run.dir == str(tmp_path / "again")
    checkpoint, whole = Checkpoint(folder, manifest), open_checkpoint(folder)
    check_same_model(config, checkpoint)
    assert restored_state(checkpoint).step == 0 and not checkpoint.has_moments()
    for name, entry in parameter_layout(config).items():
        for size in (1, 2, 4):
            parts = [checkpoint.local_part(name, entry, rank, size) for rank in range(size)]
            full = parts[0] if entry.dim is None else torch.cat(parts, dim=entry.dim)
            assert torch.equal(full, whole.tensor(name)), (name, size)


def test_imports_that_cannot_be(tmp_path: Path) -> None:
    export = exported(tmp_path, {}, fold=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    cases: list[tuple[Path, str, list[str], type[Exception], str]] = [
        (tmp_path / "nowhere", "x", [], CheckpointError, "not an export"),
        (export, "full", [], CheckpointError, "not empty"),
        (export, "x", ["model.num_layers=3"], CheckpointError, "does not fit"),
        (export, "x", ["model.ffn_hidden_size=64"], CheckpointError, "mlp"),
        (export, "x", ["model.num_layer=3"], ConfigError, "num_layer"),
    ]
    for source, output, overrides, kind, word in cases:
        with pytest.raises(kind, match=word):
            import_export(source, tmp_path / output, overrides)
    (export / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(CheckpointError, match="tokenizer"):
        import_export(export, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*partial"))
