"""Every backend of the CPU against float64, over random shapes, strides, lengths and dtypes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.kernels import attention
from tests.kernels.support import (
    ROUNDOFF,
    assert_as_exact_as_torch,
    cases,
    oracle,
    tensors,
    torch_attention,
    visible,
    with_gradients,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of few rows and few folded heads, so that small problems are cut the way large ones are."""
    from spa_dist.kernels import tiles

    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1 << 10)
    monkeypatch.setattr(tiles, "MIN_ROWS", 16)


@settings(max_examples=150, deadline=None)
@given(cases(DTYPES))
def test_tiled_is_as_exact_as_torch(case):
    assert_as_exact_as_torch(case, "tiled")


@settings(max_examples=40, deadline=None)
@given(cases([torch.bfloat16, torch.float16], min_length=128, max_length=300))
def test_tiled_is_as_exact_as_torch_with_half_precision_products(case):
    assert_as_exact_as_torch(case, "tiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_common_part_of_the_values_costs_no_digits_of_the_gradient(dtype):
    """dO · v is then 30 times what is left of it once its mean over the row has gone."""
    q, k = (torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    v = (torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(2)) + 30.0).to(dtype)
    d_out = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    seen = torch.ones(1, 200, 200, dtype=torch.bool)
    exact = with_gradients(lambda *x: oracle(*x, seen, 0.3), q.double(), k.double(), v.double(), d_out)
    mine = with_gradients(lambda *x: attention(*x, scale=0.3, backend="tiled"), q, k, v, d_out)
    for a, b in zip(mine[1:3], exact[1:3], strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 2 * ROUNDOFF[dtype]


@settings(max_examples=60, deadline=None)
@given(cases(DTYPES, max_length=300), st.sampled_from(["tiled", "auto"]), st.booleans())
def test_decoding_is_as_exact_as_torch(case, backend, infinite):
    """One query without a gradient, which has a path of its own; keys of -inf scores are not seen, in one row or in all."""
    case = replace(case, queries=1)
    q, k, v, _ = tensors(case)
    seen = visible(case)
    if infinite:
        q, k = q.abs() + 0.1, k.clone()
        hidden = torch.arange(case.keys) % 3 > 0 if case.seed % 2 else torch.ones(case.keys, dtype=torch.bool)
        k[0, :, hidden] = -torch.inf
        seen[0, :, hidden] = False
    mine = attention(q, k, v, scale=case.scale, causal=case.causal, key_lengths=case.key_lengths, backend=backend)
    k = k.masked_fill(k == -torch.inf, 0.0)
    exact, theirs = oracle(q, k, v, seen, case.scale), torch_attention(q, k, v, seen, case.scale)
    assert mine.dtype == case.dtype and mine.shape == exact.shape
    floor = (0.25 if case.dtype != torch.float64 else 1e4) * ROUNDOFF[case.dtype] * float(exact.norm())
    error = float((mine.double() - exact).norm())
    assert error <= 2 * float((theirs.double() - exact).norm()) + floor, f"error {error:.3g}, floor {floor:.3g}"


def test_decoding_does_not_need_the_general_path(monkeypatch):
    """Whatever the softmax of a row of -inf gives, the general path answers; finite scores do not reach it."""
    from spa_dist.kernels import tiled

    monkeypatch.setattr(tiled._Tiled, "apply", lambda *_: pytest.fail("the general path"))
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 16)
    with torch.no_grad():
        assert attention(q, k, v, scale=0.3, causal=True).shape == (2, 4, 1, 16)


@settings(max_examples=40, deadline=None)
@given(cases(DTYPES, max_length=40))
def test_reference_is_as_exact_as_torch(case):
    assert_as_exact_as_torch(case, "reference")


@settings(max_examples=40, deadline=None)
@given(cases(DTYPES, max_length=40, widths_qk=(16,), widths_v=(16,)))
def test_auto_is_as_exact_as_torch_at_equal_widths(case):
    assert_as_exact_as_torch(case, "auto")


@settings(max_examples=60, deadline=None)
@given(cases(DTYPES, max_length=140, widths_v=(40,), max_batch=2))
def test_auto_and_torchs_own_are_as_exact_as_torch_at_unequal_widths(case):
    assert_as_exact_as_torch(case, "auto")
    if not (case.causal and case.queries > case.keys):
        assert_as_exact_as_torch(case, "sdpa")


@settings(max_examples=20, deadline=None)
@given(cases([torch.float64], max_length=40))
def test_tiled_gradients_are_finite_differences(case):
    """Along a random direction, in float64: independent of any formula for the gradient."""
    q, k, v, d_out = tensors(case)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def value(*xs):
        out = attention(*xs, scale=case.scale, causal=case.causal, key_lengths=case.key_lengths, backend="tiled")
        return (out * d_out).sum()

    gradients = torch.autograd.grad(value(*leaves), leaves)
    for index, gradient in enumerate(gradients):
        direction, step = torch.randn_like(gradient), 1e-6

        def moved(distance, index=index, direction=direction):
            return value(*[x + distance * direction if i == index else x for i, x in enumerate((q, k, v))])

        slope = (moved(step) - moved(-step)) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)
