"""The Triton kernels: on a GPU where there is one, else the same tests in Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from spa_dist.kernels import attention
from tests.kernels.support import (
    ROUNDOFF,
    Case,
    assert_as_exact_as_torch,
    cases,
    laid_out,
    oracle,
    tensors,
    visible,
    with_gradients,
)

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [(16, 512), (32, 128), (48, 64), (64, 32), (96, 256), (128, 64), (48, 128), (16, 32)]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def triton_attention(q, k, v, **options):
    return attention(q, k, v, **({"scale": 0.3, "backend": "triton"} | options))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(cases(DTYPES, max_length=70, widths_qk=(16, 32, 48), widths_v=(32, 64), max_batch=2, min_length=16, min_keys=16))
def test_as_exact_as_torch(case):
    assert_as_exact_as_torch(case, "triton", DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_keys_are_exact_to_the_roundoff_of_their_terms(dtype):
    """Where a row sees one to three keys torch is exact by luck, so the bound is the roundoff of what is added up.

    P = exp(score - lse) carries float32's roundoff of the score; dS = P (dP - dO·O) that of O, which the dtype rounds.
    """
    u, u32 = ROUNDOFF[dtype], ROUNDOFF[torch.float32]
    for keys, queries, seed in ((1, 1, 0), (2, 1, 1), (2, 3, 2), (3, 1, 3), (3, 2, 4)):
        case = Case(1, 1, 1, queries, keys, 16, 32, False, None, "bhnd", dtype, 0.25, seed)
        q, k, v, d_out = tensors(case, DEVICE)
        exact = with_gradients(lambda *x, c=case: oracle(*x, visible(c), 0.25), q.double(), k.double(), v.double(), d_out)
        mine = with_gradients(lambda *x: triton_attention(*x, scale=0.25), q, k, v, d_out)
        score = 0.25 * float(q.double().norm() * k.double().norm())
        d_score = 0.25 * float(d_out.double().norm() * v.double().norm())
        sizes = (v.double().norm(), d_score * k.double().norm(), d_score * q.double().norm(), d_out.double().norm())
        for a, b, size in zip(mine, exact, sizes, strict=True):
            assert float((a.double() - b).norm()) <= 2 * (u + u32 * (1 + score)) * float(size) * queries**0.5


@pytest.mark.parametrize(("d_qk", "d_v"), WIDTHS)
def test_every_width_is_as_exact_as_torch(d_qk, d_v):
    """Each width of the tables at least once, the dtypes in turn, more than one block of rows and of keys."""
    dtype = DTYPES[WIDTHS.index((d_qk, d_v)) % 3]
    assert_as_exact_as_torch(Case(1, 1, 2, 70, 81, d_qk, d_v, True, (77,), "bnhd", dtype, d_qk**-0.5, 5), "triton", DEVICE)


def test_the_future_changes_no_bit_of_the_past():
    q, k, v = normal(1, 2, 150, 16), normal(1, 2, 170, 16, seed=1), normal(1, 2, 170, 32, seed=2)
    before = triton_attention(q, k, v, causal=True)
    for cut in (1, 64, 101, 149):
        k2, v2 = k.clone(), v.clone()
        k2[..., cut + 20 :, :] = 1e3
        v2[..., cut + 20 :, :] = -1e3
        after = triton_attention(q, k2, v2, causal=True)
        assert torch.equal(after[..., :cut, :], before[..., :cut, :])
        assert not torch.equal(after[..., cut:, :], before[..., cut:, :])


def test_rows_that_see_no_key_are_zero_with_zero_gradients_and_padding_is_never_read():
    q, k, v = normal(2, 2, 40, 16), normal(2, 1, 25, 16, seed=1), normal(2, 1, 25, 32, seed=2)
    k[0, :, 9:], v[0, :, 9:] = torch.nan, torch.nan
    lengths = torch.tensor([9, 0], device=DEVICE)
    results = with_gradients(
        lambda *x: triton_attention(*x, causal=True, key_lengths=lengths), q, k, v, normal(2, 2, 40, 32, seed=3)
    )
    assert all(bool(torch.isfinite(x).all()) for x in results)
    for x in results[:2]:
        assert torch.equal(x[0, :, :15], torch.zeros_like(x[0, :, :15]))
        assert bool((x[0, :, 16:] != 0).any())
    for x in results:
        assert torch.equal(x[1], torch.zeros_like(x[1]))
    assert torch.equal(results[2][0, :, 9:], torch.zeros_like(results[2][0, :, 9:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_position_and_huge_scores(dtype):
    v = normal(1, 2, 1, 32, dtype=dtype)
    assert torch.equal(triton_attention(normal(1, 2, 1, 16, dtype=dtype), normal(1, 2, 1, 16, dtype=dtype), v), v)
    q, k = normal(1, 1, 33, 16, dtype=dtype) * 60, normal(1, 1, 33, 16, dtype=dtype, seed=1) * 60
    results = with_gradients(
        lambda *x: triton_attention(*x, scale=1.0),
        q,
        k,
        normal(1, 1, 33, 32, dtype=dtype),
        normal(1, 1, 33, 32, dtype=dtype),
    )
    assert all(bool(torch.isfinite(x).all()) for x in results)
    assert float(((q.float() @ k.float().mT).abs()).max()) > 1e4


def test_keys_of_minus_infinite_score_have_no_weight():
    q, k, v = normal(1, 1, 5, 16).abs(), normal(1, 1, 9, 16, seed=1), normal(1, 1, 9, 32, seed=2)
    k[..., 3, :] = -torch.inf
    others = [j for j in range(9) if j != 3]
    torch.testing.assert_close(triton_attention(q, k, v), triton_attention(q, k[..., others, :], v[..., others, :]))
    k[...] = -torch.inf
    assert torch.equal(triton_attention(q, k, v), torch.zeros(1, 1, 5, 32, device=DEVICE))


def philox_word(seed, counter):
    """First output word of Philox 4x32-10 (Salmon et al., 2011) for arrays of counters, in numpy."""
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        c = [(b >> high) ^ c[1] ^ np.uint64(key[0]), b & low, (a >> high) ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


@pytest.mark.parametrize("seed", [7, (5 << 32) + 0xFFFFFFF0])
def test_dropout_is_philox_of_head_query_and_key(seed):
    """Uniform weights on values that are the identity show the mask itself."""
    batch, heads, queries, keys, dropout = 2, 2, 40, 32, 0.3
    q, k = torch.zeros(batch, heads, queries, 16, device=DEVICE), torch.zeros(batch, heads, keys, 16, device=DEVICE)
    v = torch.eye(keys, device=DEVICE).expand(batch, heads, keys, keys)
    seen = triton_attention(q, k, v, dropout=dropout, seed=seed) * keys * (1 - dropout)
    bh, i, j = np.meshgrid(np.arange(batch * heads), np.arange(queries), np.arange(keys), indexing="ij")
    kept = philox_word(seed, (j, i, bh, 0 * j)) >= round(dropout * 2**32)
    torch.testing.assert_close(seen.cpu(), torch.from_numpy(kept.reshape(seen.shape)).float(), rtol=1e-4, atol=1e-5)


def test_gradients_with_dropout_are_those_of_the_masked_formula():
    """The mask, read off the forward, put into plain PyTorch in float64."""
    q, k = normal(1, 2, 35, 16), normal(1, 2, 32, 16, seed=1)
    identity = torch.eye(32, device=DEVICE).expand(1, 2, 32, 32)
    mask = (triton_attention(0 * q, 0 * k, identity, dropout=0.4, seed=3) != 0).double()
    v, d_out = normal(1, 2, 32, 64, seed=2), normal(1, 2, 35, 64, seed=3)
    mine = with_gradients(lambda *x: triton_attention(*x, dropout=0.4, seed=3), q, k, v, d_out)
    plain = with_gradients(
        lambda q, k, v: (torch.softmax(0.3 * q @ k.mT, -1) * mask / 0.6) @ v, q.double(), k.double(), v.double(), d_out
    )
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_two_calls_and_two_layouts_are_bit_equal():
    q, k, v, d_out = normal(1, 2, 40, 48), normal(1, 1, 40, 48), normal(1, 1, 40, 64), normal(1, 2, 40, 64)
    runs = [
        with_gradients(lambda *x: triton_attention(*x, causal=True), laid_out(q, layout), k, laid_out(v, layout), d_out)
        for layout in ("bhnd", "bnhd", "sliced")
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(
    ("d_qk", "d_v", "dtype", "words"),
    [(24, 32, torch.float32, "d_qk in"), (16, 48, torch.float32, "d_v in"), (16, 32, torch.float64, "float64")],
)
def test_what_the_kernels_cannot_serve_is_said(d_qk, d_v, dtype, words):
    q, v = normal(1, 1, 4, d_qk, dtype=dtype), normal(1, 1, 4, d_v, dtype=dtype)
    with pytest.raises(ValueError, match=words):
        triton_attention(q, q, v)


def test_without_a_gpu_or_the_interpreter_the_refusal_says_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="CUDA device"):
        attention(q, q, torch.zeros(1, 1, 4, 32), scale=1.0, backend="triton")
