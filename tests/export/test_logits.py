"""The exported model's logits are those of the trained parameters, whatever the layout, and one wrong tensor shows."""

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


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
def test_any_tensor_joined_wrongly_is_seen(tmp_path: Path, tied: bool) -> None:
    """The test of the test: any single tensor in the wrong order moves the logits far beyond the tolerance."""
    changes = {"model.tie_embeddings": tied, "attention.per": "head", "attention.qk_norm": True}
    run = make_run(tmp_path, changes, tensor=2, data=2)
    checkpoint = open_checkpoint(run.folder)
    right = checkpoint.tensor

    for name, entry in checkpoint.manifest.layout.items():

        def wrong(asked: str, name: str = name, dim: int = entry.dim or 0) -> torch.Tensor:
            """Parts in the wrong order, or a replicated tensor moved by one."""
            tensor = right(asked)
            if asked != name:
                return tensor
            split = checkpoint.manifest.layout[name].dim is not None
            return tensor.roll(tensor.shape[dim] // 2 if split else 1, dim)

        for fold in (True, False):
            checkpoint.tensor = wrong  # type: ignore[method-assign]
            assert largest_difference(run, load_plain_model(checkpoint, fold=fold)) > 1e-3, name
            checkpoint.tensor = right  # type: ignore[method-assign]
            assert largest_difference(run, load_plain_model(checkpoint, fold=fold)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_one_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights taken over are rounded once; folded ones are within one unit in the last place of the float64 product."""
    run = make_run(tmp_path / "run", tensor=2)
    write_export(open_checkpoint(run.folder), tmp_path / "out", ExportOptions("safetensors", dtype=dtype))
    state = PlainModel.from_folder(tmp_path / "out").state_dict()
    for name, tensor in state.items():
        assert tensor.dtype == dtype
        full = run.tensors[name][: len(tensor)] if "embedding" in name else run.tensors[name]
        if ".query." in name or ".key." in name:
            projection = run.tensors[f"{name.split('.attention')[0]}.attention.projection"][0].double()
            heads = full.double().unflatten(0, (-1, 8))
            exact = torch.stack([projection.T @ head for head in heads]).flatten(0, 1)
            ulp = exact.abs().clamp(min=2.0**-14).log2().floor().exp2() * 2.0 ** -(7 if dtype == torch.bfloat16 else 10)
            assert bool(((tensor.double() - exact).abs() <= ulp).all()), name
        else:
            assert torch.equal(tensor, full.to(dtype)), name


def test_scale_is_not_the_kernels_default(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"attention.scale": "unbiased"})
    model = load_plain_model(open_checkpoint(run.folder))
    assert math.isclose(model.config.logit_scale, 8**-0.5) and model.config.query_key_width == 4
