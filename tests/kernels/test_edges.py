"""Rows without a key, single positions, huge scores, infinities, padding, the future, and dropout."""

import pytest
import torch

from spa_dist.kernels import attention
from spa_dist.kernels.problem import make_problem
from spa_dist.kernels.reference import full_keep_mask
from tests.kernels.support import laid_out, oracle, with_gradients

BACKENDS = ["tiled", "reference", "auto"]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d_qk", [8, 16])
def test_rows_that_see_no_key_are_zero_with_zero_gradients(backend, d_qk):
    """More queries than keys under a causal mask, and a sequence of length 0; equal and unequal widths."""
    q, k, v = normal(2, 2, 7, d_qk), normal(2, 2, 4, d_qk, seed=1), normal(2, 2, 4, 16, seed=2)
    lengths = torch.tensor([4, 0])
    out, d_q, d_k, d_v = with_gradients(
        lambda q, k, v: attention(q, k, v, scale=0.3, causal=True, key_lengths=lengths, backend=backend),
        q,
        k,
        v,
        normal(2, 2, 7, 16, seed=3),
    )
    for x in (out, d_q):
        assert torch.equal(x[0, :, :3], torch.zeros_like(x[0, :, :3]))
        assert torch.equal(x[1], torch.zeros_like(x[1]))
        assert bool((x[0, :, 4:] != 0).any())
    for x in (d_k, d_v):
        assert bool(torch.isfinite(x).all()) and torch.equal(x[1], torch.zeros_like(x[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_one_key_returns_the_value(backend):
    v = normal(3, 2, 1, 16, seed=2)
    out = attention(normal(3, 2, 1, 8), normal(3, 2, 1, 8, seed=1), v, scale=5.0, causal=True, backend=backend)
    assert torch.equal(out, v)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_no_keys_or_no_queries_or_no_batch(shape):
    batch, heads, queries, keys = shape
    shapes = [(batch, heads, queries, 8), (batch, heads, keys, 8), (batch, heads, keys, 16)]
    leaves = [normal(*x).requires_grad_() for x in shapes]
    out = attention(*leaves, scale=1.0)
    assert out.shape == (batch, heads, queries, 16)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores_stay_finite_and_pick_the_largest(backend, dtype):
    """Scores of about ±1e4: the softmax is an argmax, and nothing overflows in either direction."""
    q, k, v = (
        normal(1, 2, 40, 16, dtype=dtype) * 100,
        normal(1, 2, 40, 16, dtype=dtype, seed=1) * 100,
        normal(1, 2, 40, 32, dtype=dtype),
    )
    results = with_gradients(lambda q, k, v: attention(q, k, v, scale=1.0, backend=backend), q, k, v, normal(1, 2, 40, 32))
    assert all(bool(torch.isfinite(x).all()) for x in results)
    exact = oracle(q, k, v, torch.ones(1, 40, 40, dtype=torch.bool), 1.0)
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_score_of_minus_infinity_is_an_unseen_key(backend):
    q, k, v = normal(1, 1, 5, 4).abs(), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 8, seed=2)
    k[..., 2, :] = -torch.inf
    without = torch.ones(1, 5, 6, dtype=torch.bool)
    without[..., 2] = False
    finite = k.clone()
    finite[..., 2, :] = 0.0
    out = attention(q, k, v, scale=0.5, backend=backend)
    torch.testing.assert_close(out, oracle(q, finite, v, without, 0.5).float())
    k[...] = -torch.inf
    assert torch.equal(attention(q, k, v, scale=0.5, backend=backend), torch.zeros(1, 1, 5, 8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("d_qk", "length", "shift"), [(8, 200, 0), (16, 200, 0), (8, 90, 33), (8, 513, 0), (8, 100, 0)])
def test_the_future_changes_no_bit_of_the_past(backend, d_qk, length, shift):
    """Each cut: keys and values after it get other (finite, huge) contents; outputs before it are bit-equal."""
    q, k, v = (
        normal(1, 2, length, d_qk),
        normal(1, 2, length + shift, d_qk, seed=1),
        normal(1, 2, length + shift, 16, seed=2),
    )
    before = attention(q, k, v, scale=0.4, causal=True, backend=backend)
    for cut in (1, length // 3, length // 2 + 1, length - 1):
        k2, v2 = k.clone(), v.clone()
        k2[..., cut + shift :, :] = 1e3 * normal(1, 2, length - cut, d_qk, seed=3)
        v2[..., cut + shift :, :] = 1e3
        after = attention(q, k2, v2, scale=0.4, causal=True, backend=backend)
        assert torch.equal(after[..., :cut, :], before[..., :cut, :])
        assert not torch.equal(after[..., cut:, :], before[..., cut:, :])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_key_of_the_future_that_is_not_finite_changes_no_bit_of_the_past(value):
    """With finite values, so that all that is not finite are scores that a causal mask hides."""
    q, k, v = normal(2, 2, 90, 8).abs(), normal(2, 2, 90, 8, seed=1), normal(2, 2, 90, 16, seed=2)
    before = attention(q, k, v, scale=0.4, causal=True, backend="tiled")
    k[0, :, 40:] = value
    after = attention(q, k, v, scale=0.4, causal=True, backend="tiled")
    assert torch.equal(after[0, :, :40], before[0, :, :40]) and torch.equal(after[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d_qk", [8, 16])
def test_padding_is_never_read(backend, d_qk):
    """NaN past the lengths reaches neither output nor gradient."""
    q, k, v = normal(2, 2, 9, d_qk), normal(2, 2, 12, d_qk, seed=1), normal(2, 2, 12, 16, seed=2)
    lengths, d_out = torch.tensor([5, 12]), normal(2, 2, 9, 16, seed=3)

    def run(k, v):
        return with_gradients(lambda *x: attention(*x, scale=0.3, key_lengths=lengths, backend=backend), q, k, v, d_out)

    clean = run(k, v)
    k[0, :, 5:], v[0, :, 5:] = torch.nan, torch.nan
    for a, b in zip(clean, run(k, v), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(clean[2][0, :, 5:], torch.zeros(2, 7, d_qk))


def test_dropout_is_the_same_in_tiles_and_written_out_and_in_the_backward():
    q, k, v, d_out = (
        normal(2, 4, 70, 8),
        normal(2, 2, 90, 8, seed=1),
        normal(2, 2, 90, 16, seed=2),
        normal(2, 4, 70, 16, seed=3),
    )
    options = {"scale": 0.3, "causal": True, "key_lengths": torch.tensor([90, 41]), "dropout": 0.3, "seed": 11}
    mine, written = (
        with_gradients(lambda *x, b=b: attention(*x, backend=b, **options), q, k, v, d_out) for b in ("tiled", "reference")
    )
    for a, b in zip(mine, written, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    again = attention(laid_out(q, "bnhd"), k, v, **options)
    assert torch.equal(again, mine[0])
    options["seed"] = 12
    assert not torch.allclose(attention(q, k, v, **options), mine[0], atol=1e-2)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_asked_fraction_everywhere(dropout):
    """By row, by column, by head, and between two seeds: independent draws of the asked probability."""
    q, k, v = normal(2, 4, 128, 8), normal(2, 4, 256, 8), normal(2, 4, 256, 8)

    def mask(seed):
        p = make_problem(q, k, v, scale=1.0, causal=False, key_lengths=None, dropout=dropout, seed=seed)
        return full_keep_mask(p).double()

    a, b = mask(1), mask(2)
    spread = (dropout * (1 - dropout)) ** 0.5
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):
        mean = a.mean(axes)
        count = a.numel() / mean.numel()
        assert float((mean - (1 - dropout)).abs().max()) < 5 * spread / count**0.5
    keep = 1 - dropout
    assert abs(float((a * b).mean()) - keep * keep) < 5 / a.numel() ** 0.5
    assert abs(float((a[:, :, 1:] * a[:, :, :-1]).mean()) - keep * keep) < 5 / a.numel() ** 0.5
    assert abs(float((a[:, 1:] * a[:, :-1]).mean()) - keep * keep) < 5 / a.numel() ** 0.5


def test_dropout_is_unbiased():
    q, k, v = normal(1, 1, 16, 8), normal(1, 1, 64, 8, seed=1), normal(1, 1, 64, 8, seed=2)
    plain = attention(q, k, v, scale=0.3)
    draws = torch.stack([attention(q, k, v, scale=0.3, dropout=0.25, seed=s) for s in range(2000)])
    error = (draws.mean(0) - plain) / (draws.std(0) / 2000**0.5)
    assert float(error.abs().max()) < 5.0


def test_two_calls_are_bit_equal():
    q, k, v, d_out = normal(2, 4, 300, 16), normal(2, 4, 300, 16), normal(2, 4, 300, 32), normal(2, 4, 300, 32)
    first, second = (
        with_gradients(lambda *x: attention(*x, scale=0.3, causal=True, backend="tiled"), q, k, v, d_out) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_changes_nothing():
    q, k, v = normal(1, 2, 33, 8), normal(1, 2, 33, 8), normal(1, 2, 33, 16)
    plain = attention(q, k, v, scale=0.3, backend="tiled")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, scale=0.3, backend="tiled"), plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "fast"}, "unknown backend"),
        ({"dropout": 1.0}, "dropout"),
        ({"key_lengths": torch.ones(3, dtype=torch.long)}, "key_lengths"),
        ({"q": torch.zeros(2, 3, 4, 8)}, "multiple"),
        ({"k": torch.zeros(2, 2, 4, 9)}, "shapes do not match"),
        ({"v": torch.zeros(2, 2, 5, 16)}, "shapes do not match"),
        ({"v": torch.zeros(2, 2, 4, 16).double()}, "dtype"),
        ({"q": torch.zeros(2, 4, 8)}, r"\[batch, heads, length, width\]"),
        (
            {"q": torch.zeros(2, 2, 4, 8).int(), "k": torch.zeros(2, 2, 4, 8).int(), "v": torch.zeros(2, 2, 4, 16).int()},
            "float",
        ),
        ({"backend": "sdpa", "v": torch.zeros(2, 2, 4, 4)}, "equal widths"),
    ],
)
def test_arguments_that_do_not_fit_are_one_clear_line(change, words):
    arguments = {
        "q": torch.zeros(2, 2, 4, 8),
        "k": torch.zeros(2, 2, 4, 8),
        "v": torch.zeros(2, 2, 4, 16),
        "scale": 1.0,
    } | change
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(ValueError, match=words) as caught:
        attention(q, k, v, **arguments)
    assert "\n" not in str(caught.value)
