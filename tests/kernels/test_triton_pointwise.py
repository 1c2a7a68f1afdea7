"""The elementwise Triton kernels behind the public functions: on a GPU where there is one, else in Triton's interpreter."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spa_dist.kernels import bias_dropout_residual, bias_gelu, cross_entropy, pointwise
from spa_dist.kernels.triton_backend import serves_elementwise
from tests.kernels.support import with_gradients
from tests.kernels.test_triton import philox_word

pytest.importorskip("triton")

from spa_dist.kernels import triton_cross_entropy, triton_pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Every call goes to the kernels, in tiles so small that each tensor here has several in both directions."""
    monkeypatch.setattr(pointwise, "serves_elementwise", lambda *tensors: True)
    monkeypatch.setattr(sys.modules["spa_dist.kernels.cross_entropy"], "serves_elementwise", lambda *tensors: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_pointwise, "ROWS", 2)
        monkeypatch.setattr(triton_pointwise, "COLUMNS", 16)
        monkeypatch.setattr(triton_pointwise, "MAX_PARTS", 3)
        monkeypatch.setattr(triton_cross_entropy, "BLOCK", 16)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_exact_to_roundoff(mine, exact, dtype):
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((3, 7), 20), ((1,), 5), ((2, 1, 4), 48)])
def test_bias_gelu_is_the_formula(dtype, shape, width):
    """Against float64 of the rounded inputs; half precision also rounds x + bias, as torch does."""
    x, bias, d_out = (
        normal(*shape, width, dtype=dtype),
        normal(width, dtype=dtype, seed=1),
        normal(*shape, width, dtype=dtype, seed=2),
    )
    mine = with_gradients(lambda x, b: bias_gelu(x * 1, b), x, bias, d_out)
    total = (x + bias).double() if dtype != torch.float32 else x.double() + bias.double()
    slope = torch.autograd.functional.jvp(F.gelu, total, torch.ones_like(total))[1] * d_out.double()
    exact = [F.gelu(total), slope, slope.reshape(-1, width).sum(0)]
    assert mine[0].dtype == dtype and mine[2].dtype == dtype
    assert_exact_to_roundoff(mine, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bias_dropout_residual_is_the_formula_under_philox(dtype, with_bias, dropout):
    """The mask comes from Philox in numpy, by the element's index; a seed above 32 bits reaches both words of the key."""
    seed, shape = (5 << 32) + 0xFFFFFFF0, (3, 7, 20)
    x, residual, d_out = (normal(*shape, dtype=dtype, seed=s) for s in (0, 1, 2))
    inputs = [x, residual, *([normal(20, dtype=dtype, seed=3)] if with_bias else [])]
    index = np.arange(x.numel())
    kept = torch.from_numpy(philox_word(seed, (index, 0 * index, 0 * index, 0 * index)) >= round(dropout * 2**32)).view(
        shape
    )
    assert bool(kept.all()) == (dropout == 0.0)
    factor = kept.double().to(DEVICE) / (1 - dropout)

    def mine(x, r, bias=None):
        return bias_dropout_residual(x * 1, bias, r, dropout=dropout, seed=seed)

    def formula(x, r, bias=0.0):
        return r + factor * (x + bias)

    got = with_gradients(mine, *inputs, d_out)
    wanted = with_gradients(formula, *(t.double() for t in inputs), d_out.double())
    assert_exact_to_roundoff(got, wanted, dtype)


def test_a_tensor_that_was_written_over_is_noticed():
    """As with torch's own in-place functions: a backward that needs the old contents must fail, not go wrong."""
    x, bias = normal(4, 8).requires_grad_(), normal(8, seed=1)

    def residual(x, bias):
        return bias_dropout_residual(x, bias, x.detach(), dropout=0.1, seed=1)

    for write in (bias_gelu, residual):
        squared = x * 1
        loss = (squared**2).sum()
        write(squared, bias)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    logits = normal(4, 5).requires_grad_() * 1
    loss = cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=DEVICE))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes", "padding"), [(5, 40, 0), (3, 7, 30), (1, 1, 0), (4, 33, 3)])
def test_cross_entropy_is_torchs(dtype, rows, classes, padding):
    """Ignored rows, columns of padding with huge logits, logits of -inf, and logits too large for exp."""
    logits = normal(rows, classes + padding, dtype=dtype) * 30
    logits[:, classes:] = 1e4
    logits[0, 1 : classes - 1] = -torch.inf
    targets = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    targets[0] = 0
    if rows > 1:
        targets[1] = -1
    exact = logits[:, :classes].double().requires_grad_()
    loss = F.cross_entropy(exact, targets, ignore_index=-1, reduction="sum")
    (3 * loss).backward()
    leaf = logits.clone().requires_grad_()
    mine = cross_entropy(leaf.clone(), targets, ignore_index=-1, num_classes=classes)
    (3 * mine).backward()
    assert mine.dtype == torch.float32 and leaf.grad.dtype == dtype
    torch.testing.assert_close(mine.double(), loss.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(leaf.grad[:, :classes].double(), exact.grad, rtol=TOLERANCE[dtype], atol=6 * TOLERANCE[dtype])
    assert torch.equal(leaf.grad[:, classes:], torch.zeros_like(logits[:, classes:]))


def test_cross_entropy_over_split_classes_is_that_of_the_whole():
    """Three parts, the last of padding alone; what ranks would join is computed here from the whole."""
    logits, targets = normal(9, 24), torch.tensor([0, 13, -1, 4, 3, -1, 1, 8, 12], device=DEVICE)
    exact = logits[:, :14].double().requires_grad_()
    F.cross_entropy(exact, targets, ignore_index=-1, reduction="sum").backward()
    top = logits[:, :14].amax(-1)
    whole = (
        top,
        (logits[:, :14] - top[:, None]).exp().sum(-1),
        logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0),
    )
    parts, shares = [], []

    def all_reduce(x, op):
        if op == "sum":
            shares[-1].append(x.clone())
        x.copy_(whole[len(calls)])
        calls.append(op)

    for part in range(3):
        calls = []
        shares.append([])
        leaf = logits[:, 8 * part : 8 * part + 8].clone().requires_grad_()
        cross_entropy(
            leaf * 1, targets, ignore_index=-1, first_class=8 * part, num_classes=14, all_reduce=all_reduce
        ).backward()
        assert calls == ["max", "sum", "sum"]
        parts.append(leaf.grad)
    for index in (0, 1):
        torch.testing.assert_close(sum(share[index] for share in shares), whole[index + 1])
    torch.testing.assert_close(torch.cat(parts, -1)[:, :14].double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert not bool(torch.cat(parts, -1)[:, 14:].any())


def test_what_is_not_on_a_gpu_or_not_contiguous_is_torchs():
    assert not serves_elementwise(torch.zeros(2, 3))
    if DEVICE == "cuda":
        x = torch.zeros(2, 4, device="cuda")
        assert serves_elementwise(x, None)
        assert not any(serves_elementwise(other) for other in (x.T, x.double(), x[:0]))
