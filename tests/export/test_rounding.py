"""Exports in 16 bits: every weight is the exact one, folded or not, rounded to nearest once."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import plain_config, plain_tensor
from spa_dist.export.model import PlainModel
from spa_dist.export.write import ExportOptions, write_export
from tests.export.synthetic_run import make_run

FORMATS = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}
"""Significant bits, and exponent of the smallest normal number."""


def nearest(exact: Fraction, dtype: torch.dtype) -> Fraction:
    """The number of the format that is nearest, ties to even, in exact arithmetic."""
    bits, lowest = FORMATS[dtype]
    exponent = max(math.frexp(float(exact))[1] - 1, lowest)
    if abs(exact) < Fraction(2) ** exponent and exponent > lowest:  # float() went up to a power of two
        exponent -= 1
    ulp = Fraction(2) ** (exponent - bits + 1)
    return round(exact / ulp) * ulp


def folded(weight: Tensor, projection: Tensor) -> list[Fraction]:
    """Entries of S^T W_h of every head, flattened, in exact arithmetic. weight [H·d_k, ...], projection [d_k, d_proj]."""
    columns = [[Fraction(value) for value in column] for column in projection.T.tolist()]
    out = []
    for head in weight.reshape(-1, projection.shape[0], weight.shape[1:].numel()).tolist():
        for column in columns:
            used = [(value, head[row]) for row, value in enumerate(column) if value]
            out += [sum(value * Fraction(row[i]) for value, row in used) for i in range(len(head[0]))]
    return out


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_weight_is_rounded_once(tmp_path: Path, dtype: torch.dtype, fold: bool) -> None:
    run = make_run(tmp_path / "run", {"model.num_layers": 1}, tensor=2)
    write_export(open_checkpoint(run.folder), tmp_path / "out", ExportOptions("safetensors", fold=fold, dtype=dtype))
    for name, tensor in PlainModel.from_folder(tmp_path / "out").state_dict().items():
        full = run.tensors[name][: len(tensor)] if "embedding" in name else run.tensors[name]
        if fold and (".query." in name or ".key." in name):
            exact = folded(full, run.tensors["layers.0.attention.projection"][0])
        else:
            exact = [Fraction(value) for value in full.flatten().tolist()]
        assert tensor.dtype == dtype
        assert [Fraction(value) for value in tensor.flatten().tolist()] == [nearest(x, dtype) for x in exact], name


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_product_just_off_a_tie_does_not_become_one(tmp_path: Path, dtype: torch.dtype, sign: int) -> None:
    """Queries of 1 + ulp/2 + 2^-40, and the same minus 2^-40: fp32 has no room for the last term, which decides."""
    run = make_run(tmp_path)
    kept = plain_config(open_checkpoint(run.folder).manifest)
    half = 2.0 ** -FORMATS[dtype][0]
    projection = torch.zeros(1, 8, 4)
    projection[0, :3, 0] = 1.0
    projection[0, :2, 1], projection[0, 2, 1] = 1.0, -1.0
    weight = torch.zeros(64, 1)
    weight[:3, 0] = sign * torch.tensor([1.0, half, 2.0**-40])
    name = "layers.0.attention.query.weight"
    read = {name: weight, "layers.0.attention.projection": projection}
    above, below = plain_tensor(name, read.__getitem__, kept, fold=True, dtype=dtype)[:2, 0].tolist()
    assert (above, below) == (sign * (1 + 2 * half), sign)


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    kept = plain_config(open_checkpoint(run.folder).manifest)
    with pytest.raises(CheckpointError, match=r"norm\.bias .*use bf16"):
        plain_tensor("norm.bias", lambda _: torch.tensor([1.0, -70_000.0]), kept, fold=True, dtype=torch.float16)
