"""The exported model's logits are those of the trained parameters, in float64, whatever the layout they were saved at."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import PlainModel
from spa_dist.export.write import FORMATS, ExportOptions, write_export
from tests.export.reference import reference_logits
from tests.export.synthetic_run import Run, make_run

TOKENS = [3, 60, 0, 17, 17, 42, 5]
CASES: dict[str, dict[str, Any]] = {
    **{
        pattern: {"attention.pattern": pattern}
        for pattern in ("random", "block", "banded", "hierarchical", "conv", "gaussian")
    },
    "head_specific": {"attention.pattern": "head_specific"},
    "per_head": {"attention.per": "head", "attention.scale": "unbiased"},
    "trainable": {"attention.trainable": True, "attention.scale": 0.3},
    "qk_norm": {"attention.qk_norm": True},
    "dense": {"attention.kind": "dense"},
    "thin": {"attention.kind": "thin", "attention.qk_norm": True},
    "learned": {"model.positions": "learned", "model.norm": "rmsnorm", "model.bias": False},
    "no_positions": {"model.positions": "none", "model.num_kv_heads": 8, "model.norm_eps": 1e-3},
}


def largest_difference(run: Run, model: PlainModel) -> float:
    logits = model(torch.tensor([TOKENS]))[0]
    assert logits.shape == (len(TOKENS), 61)
    return float((logits - expected_logits(run)).abs().max())


def expected_logits(run: Run) -> torch.Tensor:
    """The reference's answer: a function of the config, since the full tensors do not depend on the layout."""
    key = run.config.model_dump_json()
    if key not in _EXPECTED:
        _EXPECTED[key] = reference_logits(run.config, run.tensors, TOKENS)
    return _EXPECTED[key]


_EXPECTED: dict[str, torch.Tensor] = {}


@torch.inference_mode()
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_kind_at_every_layout(tmp_path: Path, case: str, tied: bool, fold: bool) -> None:
    for tensor in (1, 2, 4):
        for data in (1, 2, 3):
            changes = CASES[case] | {"model.tie_embeddings": tied}
            run = make_run(tmp_path / f"{tensor}-{data}", changes, tensor=tensor, data=data)
            model = load_plain_model(open_checkpoint(run.folder), fold=fold)
            assert largest_difference(run, model) <= 1e-5, (tensor, data)
            if not fold:  # nothing was rounded on the way: in float64 nothing but its own rounding may remain
                assert largest_difference(run, model.double()) <= 1e-12, (tensor, data)


@torch.inference_mode()
@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("fold", [True, False])
def test_written_and_loaded(tmp_path: Path, file_format: str, fold: bool) -> None:
    run = make_run(tmp_path / "run", {"model.tie_embeddings": False}, tensor=2, data=2)
    limit = None if file_format == "pytorch" else 8_000
    options = ExportOptions(file_format, fold=fold, max_shard_bytes=limit)
    write_export(open_checkpoint(run.folder), tmp_path / "out", options)
    assert largest_difference(run, PlainModel.from_folder(tmp_path / "out")) <= 1e-5


def test_scale_is_not_the_kernels_default(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"attention.scale": "unbiased"})
    model = load_plain_model(open_checkpoint(run.folder))
    assert math.isclose(model.config.logit_scale, 8**-0.5) and model.config.query_key_width == 4
