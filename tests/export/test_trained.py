"""Real checkpoints, written by the trainer at every layout: the export computes the trainer's logits, and a wrong merge shows.

EVERY_LAYOUT=1 takes each model to each layout, tied and untied: 234 runs instead of 54.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spa_dist.export.checkpoint import Checkpoint, open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import PlainModel
from spa_dist.export.write import FORMATS, ExportOptions, write_export
from spa_dist.parallel.layout import parameter_layout
from tests.distributed import run_in_processes
from tests.training.layouts import SMALL, config_with

TOLERANCE = 1e-5
VOCABULARY = SMALL["model"]["vocab_size"]
STAGE = "deepspeed.zero_optimization.stage"

MODELS: dict[str, dict[str, Any]] = {
    **{
        pattern: {"attention.pattern": pattern, "attention.trainable": False}
        for pattern in ("random", "banded", "hierarchical", "conv", "head_specific", "gaussian")
    },
    "block": {"attention.pattern": "block", "attention.block": [2, 2], "attention.trainable": False},
    "per_head": {"attention.per": "head", "attention.scale": "unbiased", "attention.qk_norm": False},
    "trained": {"attention.fold": False, "attention.scale": 0.3, "attention.qk_norm": False},
    "dense": {"attention.kind": "dense"},
    "thin": {"attention.kind": "thin", "parallel.sequence": True},
    "multi_head": {
        "model.num_kv_heads": 8,
        "model.bias": False,
        "model.norm": "rmsnorm",
        "model.positions": "none",
    },
    "learned": {"model.positions": "learned", "attention.per": "head", "parallel.sequence": True},
    **{
        f"mask_{method}": {
            "attention.pattern": pattern,
            "attention.per": per,
            "attention.qk_norm": False,
            "attention.trainable": False,
            "attention.mask": {"method": method, "start": "random", "start_sparsity": 0.3, method: {}} | options,
        }
        for method, pattern, per, options in (
            ("magnitude", "learned", "layer", {"magnitude": {"last_step": 9, "regrow": 0.3}}),
            ("gumbel", "adaptive", "head", {}),
            ("l0", "adaptive", "layer", {}),
        )
    },
    "mask_none": {
        "attention.pattern": "adaptive",
        "attention.qk_norm": False,
        "attention.trainable": False,
        "attention.mask": {"method": "none"},
    },
    "gated_dense": {"attention.kind": "dense", "attention.gate": True, "attention.qk_norm": False},
}
"""Every pattern, kind and option of the model, as changes to SMALL (grouped queries, QK-norm, trained S)."""

Case = tuple[str, bool, int, int]
"""Model, tied, tensor-parallel size, ZeRO stage."""


def cases_of(model: str) -> list[Case]:
    """Each combination for the first model; for the others each size and each stage once, in a square that shifts."""
    sizes, stages, number = (1, 2, 4), (1, 2, 3), list(MODELS).index(model)
    if number == 0 or os.environ.get("EVERY_LAYOUT"):
        return [(model, tied, size, stage) for size in sizes for stage in stages for tied in (True, False)]
    return [(model, (number + i) % 2 == 0, size, stages[(number + i) % 3]) for i, size in enumerate(sizes)]


HALF = [(model, True, size, stage) for size, stage in ((1, 3), (2, 1), (4, 2)) for model in ("random", "per_head", "thin")]
"""Cases that are trained in bf16 too."""


IMPORTED = [("random", True, 1, 3), ("random", False, 2, 2), ("random", True, 4, 1)]
"""Cases whose export is made a run again, and trained on at the case's layout."""


def changes_of(case: Case) -> dict[str, Any]:
    model, tied, size, stage = case
    return MODELS[model] | {"model.tie_embeddings": tied, "parallel.tensor": size, STAGE: stage}


def folder_of(case: Case, dtype: str = "fp32") -> str:
    model, tied, size, stage = case
    return f"{model}-{'tied' if tied else 'untied'}-tp{size}-zero{stage}-{dtype}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of each case, from one launch of four processes."""
    folder = tmp_path_factory.mktemp("trained")
    wanted = [(case, "fp32") for model in MODELS for case in cases_of(model)] + [(case, "bf16") for case in HALF]
    cases = [
        {
            "name": folder_of(case, dtype),
            "changes": changes_of(case) | {"precision.dtype": dtype},
            "import": (False, True) if case in IMPORTED and dtype == "fp32" else (),
        }
        for case, dtype in sorted(wanted, key=lambda each: each[0][2])
    ]
    argument = {"folder": str(folder), "cases": cases}
    assert run_in_processes("tests.export.trained:train_and_save", 4, argument, 600.0) == len(cases)
    return folder


def trainer_of(run: Path) -> dict[str, Any]:
    """What the trainer computed: tokens, logits (vocabulary padding cut off), working weights."""
    trainer = torch.load(run / "trainer.pt")
    return trainer | {"logits": trainer["logits"][..., :VOCABULARY]}


@torch.inference_mode()
def difference(model: PlainModel, trainer: dict[str, Any]) -> float:
    """Largest difference of the plain model's logits from the trainer's."""
    logits = model(trainer["tokens"])
    assert logits.shape == trainer["logits"].shape
    return float((logits - trainer["logits"]).abs().max())


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_trainers(runs: Path, model: str, fold: bool) -> None:
    found = {}
    for case in cases_of(model):
        run = runs / folder_of(case)
        found[case] = difference(load_plain_model(open_checkpoint(run), fold=fold), trainer_of(run))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("file_format", FORMATS)
def test_logits_of_the_written_folder(runs: Path, tmp_path: Path, file_format: str, fold: bool) -> None:
    for model in MODELS:
        run = runs / folder_of(cases_of(model)[1])
        write_export(open_checkpoint(run), tmp_path / model, ExportOptions(file_format, fold=fold))
        assert difference(PlainModel.from_folder(tmp_path / model), trainer_of(run)) <= TOLERANCE, model


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("case", IMPORTED, ids=folder_of)
def test_the_way_back_is_trained_on_at_any_layout(runs: Path, case: Case, fold: bool) -> None:
    """Imported (with S folded in: as thin attention) and restored under DeepSpeed, the logits are the first trainer's again."""
    again = torch.load(runs / folder_of(case) / f"again-{fold}.pt")
    expected = trainer_of(runs / folder_of(case))["logits"]
    assert float((again["logits"][..., :VOCABULARY] - expected).abs().max()) <= TOLERANCE
    assert 0 < again["loss"] < 6


def swapped(tensor: Tensor, dim: int | None) -> Tensor:
    """Two ranks' parts in the wrong order; a tensor that is not split, moved by one."""
    return tensor.roll(1, 0 if tensor.shape[0] > 1 else 1) if dim is None else tensor.roll(tensor.shape[dim] // 2, dim)


def reordered(tensor: Tensor, dim: int | None) -> Tensor:
    """Data-parallel fragments of each part in the wrong order."""
    parts = [tensor] if dim is None else tensor.chunk(2, dim)
    turned = [part.flatten().roll(part.numel() // 2).view(part.shape) for part in parts]
    return turned[0] if dim is None else torch.cat(turned, dim)


def repeated(tensor: Tensor, dim: int | None) -> Tensor:
    """The first rank's part (of a tensor that is not split, the first fragment) in every place."""
    if dim is None:
        return tensor.flatten()[: tensor.numel() // 2].repeat(2).view(tensor.shape)
    return torch.cat([tensor.chunk(2, dim)[0]] * 2, dim)


BROKEN: list[Case] = [
    next(case for case in cases_of(model) if case[2] == 2)
    for model in ("learned", "per_head", "mask_gumbel", "mask_magnitude")
]
"""Cases whose merge is broken below; between them they have every kind of tensor."""
NAMES = [(case, name) for case in BROKEN for name in parameter_layout(config_with(changes_of(case)))]


@pytest.mark.parametrize(("case", "name"), NAMES, ids=[f"{case[0]}-{name}" for case, name in NAMES])
def test_a_wrong_merge_of_any_tensor_is_seen(runs: Path, case: Case, name: str) -> None:
    """The test of the tests above: one tensor joined wrongly, in any way, moves the logits far beyond their tolerance."""
    run = runs / folder_of(case)
    trainer, checkpoint = trainer_of(run), open_checkpoint(run)
    for wrong in (swapped, reordered, repeated):
        for fold in (True, False):
            model = load_plain_model(merging_wrongly(checkpoint, name, wrong), fold=fold)
            assert difference(model, trainer) > 10 * TOLERANCE, (wrong.__name__, fold)


def merging_wrongly(checkpoint: Checkpoint, name: str, wrong: Callable[[Tensor, int | None], Tensor]) -> Checkpoint:
    """The checkpoint, but for one tensor."""
    broken = Checkpoint(checkpoint.manifest)
    dim = checkpoint.manifest.layout[name].dim
    broken.tensor = lambda asked: (  # type: ignore[method-assign]
        wrong(checkpoint.tensor(asked), dim) if asked == name else checkpoint.tensor(asked)
    )
    return broken


@pytest.mark.parametrize("case", HALF, ids=folder_of)
def test_bf16_weights_are_those_that_the_trainer_multiplied_with(runs: Path, tmp_path: Path, case: Case) -> None:
    """Bit for bit, unfolded: both are the fp32 masters, rounded once."""
    run = runs / folder_of(case, "bf16")
    write_export(open_checkpoint(run), tmp_path / "out", ExportOptions("safetensors", fold=False, dtype=torch.bfloat16))
    working = trainer_of(run)["working"]
    for name, tensor in PlainModel.from_folder(tmp_path / "out").state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, working[name][: len(tensor)].bfloat16()), name


@torch.inference_mode()
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("case", HALF, ids=folder_of)
def test_bf16_logits_are_the_trainers_within_one_ulp_of_the_weights(
    runs: Path, tmp_path: Path, case: Case, fold: bool
) -> None:
    """No further from the trainer's bf16 logits than exact logits move when every weight moves by one unit in the last place."""
    run = runs / folder_of(case, "bf16")
    write_export(open_checkpoint(run), tmp_path / "out", ExportOptions("safetensors", fold=fold, dtype=torch.bfloat16))
    trainer = trainer_of(run)
    exact = PlainModel.from_folder(tmp_path / "out", dtype=torch.float64)(trainer["tokens"])
    moves = []
    for _ in range(4):
        moved = PlainModel.from_folder(tmp_path / "out", dtype=torch.float64)
        for tensor in moved.state_dict().values():
            direction = torch.where(torch.rand(tensor.shape) < 0.5, -torch.inf, torch.inf).bfloat16()
            tensor.copy_(torch.where(tensor == 0, 0.0, torch.nextafter(tensor.bfloat16(), direction).double()))
        moves.append(float((moved(trainer["tokens"]) - exact).abs().max()))
    assert difference(PlainModel.from_folder(tmp_path / "out"), trainer) <= min(moves)
