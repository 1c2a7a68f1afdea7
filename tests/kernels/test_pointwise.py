"""The elementwise functions against the plain formulas in float64, their gradients by finite differences, and what they keep."""

import logging
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.kernels import (
    bias_dropout_residual,
    bias_gelu,
    cross_entropy,
    layer_norm,
    pointwise,
    rms_norm,
)
from tests.kernels.test_memory import largest_and_peak


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def saved_bytes(function):
    """Bytes that autograd keeps for the backward of function()."""
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        function()
    return sum(kept.values())


def test_gradients_are_finite_differences():
    """The functions write over their first argument, so each call gets a product of its own."""
    x, bias, residual = (normal(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 3, 5), (5,), (2, 3, 5)]))
    assert torch.autograd.gradcheck(lambda a, b: bias_gelu(2 * a, b), (x, bias))
    for dropout in (0.0, 0.4):
        assert torch.autograd.gradcheck(
            lambda a, b, c, p=dropout: bias_dropout_residual(2 * a, b, c, dropout=p, seed=3), (x, bias, residual)
        )
    assert torch.autograd.gradcheck(lambda a, c: bias_dropout_residual(2 * a, None, c, dropout=0.3, seed=3), (x, residual))


class Returned(torch.autograd.Function):
    """What hands its input on, as a reduction over a group of one does."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, d_out):
        return 3 * d_out


def test_what_a_function_returned_as_it_was_may_be_written_over():
    x, bias = normal(4, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    bias_dropout_residual(Returned.apply(x * 2), bias, x, dropout=0.0, seed=0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 7.0)) and torch.equal(bias.grad, torch.full_like(bias, 4.0))


def test_values_are_the_formulas():
    x, bias, residual = normal(4, 8), normal(8, seed=1), normal(4, 8, seed=2)
    expected = 0.5 * (x + bias) * (1 + torch.erf((x + bias) / 2**0.5))
    torch.testing.assert_close(bias_gelu(x.clone(), bias), expected)
    torch.testing.assert_close(bias_dropout_residual(x.clone(), bias, residual, dropout=0.0, seed=0), x + bias + residual)
    torch.testing.assert_close(bias_dropout_residual(x.clone(), None, residual, dropout=0.0, seed=0), x + residual)


def split_cross_entropy(logits, targets, parts, num_classes, all_reduces):
    """cross_entropy of each part of the columns, as ranks would call it one after the other; all_reduces: what they joined."""
    width, losses = logits.shape[1] // parts, []
    for part in range(parts):
        joined = iter(all_reduces)
        losses.append(
            cross_entropy(
                logits[:, part * width : (part + 1) * width].contiguous(),
                targets,
                ignore_index=-1,
                first_class=part * width,
                num_classes=num_classes,
                all_reduce=lambda x, op, joined=joined: x.copy_(next(joined)),
            )
        )
    return losses


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_cross_entropy_is_torchs(rows, classes, padding, dtype, seed):
    """Loss and gradient against torch in float64: rows ignored, columns of padding with huge logits, several chunks."""
    logits = normal(rows, classes + padding, dtype=dtype, seed=seed)
    logits[:, classes:] = 1e4
    targets = torch.randint(-1, classes, (rows,), generator=torch.Generator().manual_seed(seed))
    exact = logits[:, :classes].double().requires_grad_()
    loss = F.cross_entropy(exact, targets, ignore_index=-1, reduction="sum")
    (3 * loss).backward()
    leaf = logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["spa_dist.kernels.cross_entropy"], "CHUNK_BYTES", 16 * (classes + padding))
        mine = cross_entropy(leaf.clone(), targets, ignore_index=-1, num_classes=classes)
        (3 * mine).backward()
    assert mine.dtype == torch.float32 and leaf.grad.dtype == dtype
    torch.testing.assert_close(mine.double(), loss.detach(), rtol=2e-5, atol=2e-5 * rows)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(leaf.grad[:, :classes].double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert torch.equal(leaf.grad[:, classes:], torch.zeros_like(logits[:, classes:]))


@pytest.mark.parametrize("parts", [2, 4])
def test_cross_entropy_over_split_classes_is_that_of_the_whole(parts):
    """The maximum, sum and picked logit that ranks would join are computed here from the whole."""
    logits, targets = normal(9, 16), torch.tensor([0, 13, -1, 4, 3, -1, 1, 8, 12])
    exact = logits[:, :14].clone().requires_grad_()
    loss = F.cross_entropy(exact, targets, ignore_index=-1, reduction="sum")
    loss.backward()
    top = logits[:, :14].amax(-1)
    total = (logits[:, :14] - top[:, None]).exp().sum(-1)
    picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
    leaf = logits.clone().requires_grad_()
    losses = split_cross_entropy(leaf, targets, parts, 14, (top, total, picked))
    for part in losses:
        torch.testing.assert_close(part, loss.detach())
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(leaf.grad[:, :14], exact.grad)
    assert torch.equal(leaf.grad[:, 14:], torch.zeros(9, 2, dtype=leaf.dtype))


def test_cross_entropy_holds_the_logits_once(monkeypatch):
    """Nothing of their size is allocated, forward or backward, while torch's makes three such blocks."""
    monkeypatch.setattr(sys.modules["spa_dist.kernels.cross_entropy"], "CHUNK_BYTES", 4 * 1000 * 16)
    targets = torch.randint(0, 1000, (2048,))
    size = 2048 * 1000 * 4

    def run(function):
        logits = normal(2048, 1000, dtype=torch.float32).requires_grad_()
        shifted = logits * 1
        return largest_and_peak(lambda: torch.autograd.grad(function(shifted, targets), shifted))

    assert run(lambda x, t: cross_entropy(x, t))[1] < 0.3 * size
    assert run(lambda x, t: F.cross_entropy(x, t, reduction="sum"))[1] >= 1.9 * size
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss = cross_entropy(normal(4, 5).requires_grad_() * 1, targets[:4] % 5)
        loss.backward(retain_graph=True)
        loss.backward()


def test_bias_gelu_and_residual_keep_no_intermediate():
    x, bias = normal(64, 128, dtype=torch.float32).requires_grad_() * 1, normal(128, dtype=torch.float32).requires_grad_()
    assert saved_bytes(lambda: bias_gelu(x, bias)) <= x.numel() * 4 + 128 * 4
    residual = normal(64, 128, dtype=torch.float32, seed=1)
    assert saved_bytes(lambda: bias_dropout_residual(x, bias, residual, dropout=0.5, seed=1)) <= 128 * 4


def test_dropout_before_the_residual_is_a_function_of_the_seed():
    x, residual = torch.ones(400, 50), torch.zeros(400, 50)
    a, again, b = (bias_dropout_residual(x.clone(), None, residual, dropout=0.2, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert a.unique().tolist() == [0.0, pytest.approx(1.25, rel=1e-4)]
    assert abs(float(a.mean()) - 1.0) < 5 * 0.5 / 20000**0.5
    with pytest.raises(ValueError, match="must match"):
        bias_dropout_residual(x, None, residual[:1], dropout=0.0, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_the_formulas(dtype):
    x, weight, bias = normal(6, 32, dtype=dtype), normal(32, dtype=dtype, seed=1), normal(32, dtype=dtype, seed=2)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    root = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5).double(), layer, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), root, rtol=tolerance, atol=tolerance)


def test_a_package_that_is_only_called_apex_is_not_used(tmp_path, monkeypatch, caplog):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    pointwise._apex.cache_clear()
    with caplog.at_level(logging.INFO):
        assert pointwise._apex("cuda") is None
    assert "norms: torch's" in caplog.text
    pointwise._apex.cache_clear()
