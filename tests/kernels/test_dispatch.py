"""What `auto` picks, that it says so once, why a backend refuses, FlexAttention, and decoding."""

import logging
from types import SimpleNamespace

import pytest
import torch

from spa_dist.kernels import attention, dispatch
from spa_dist.kernels.problem import make_problem
from tests.kernels.support import oracle, with_gradients


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(d_qk, d_v, dtype=torch.float32, length=8, device="cpu", grad=False, batch=1, queries=None, **options):
    shapes = ((queries or length, d_qk), (length, d_qk), (length, d_v))
    q, k, v = (torch.empty(batch, 2, *shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes)
    p = make_problem(q, k, v, **({"scale": 1.0, "causal": True, "key_lengths": None, "dropout": 0.0, "seed": 0} | options))
    return p._replace(device=torch.device(device))


def test_auto_on_cpu():
    assert dispatch.choose(problem(16, 16)).backend == "sdpa"
    assert dispatch.choose(problem(16, 32, length=128, grad=True)).backend == "sdpa"
    assert dispatch.choose(problem(16, 32, length=129)).backend == "tiled"
    assert dispatch.choose(problem(16, 32, length=128, batch=4)).backend == "sdpa"
    assert dispatch.choose(problem(16, 32, length=128, batch=5)).backend == "tiled"
    assert dispatch.choose(problem(32, 32, length=128, batch=33)).backend == "sdpa"
    assert dispatch.choose(problem(16, 32, queries=1)).backend == "tiled"
    assert dispatch.choose(problem(32, 32, queries=1)).backend == "sdpa"
    assert dispatch.choose(problem(32, 32, torch.bfloat16, queries=1)).backend == "tiled"
    assert dispatch.choose(problem(32, 16)).backend == "tiled"
    assert dispatch.choose(problem(16, 16, dropout=0.1)).backend == "tiled"
    assert dispatch.choose(problem(16, 16, torch.float64)).backend == "tiled"


def test_auto_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert dispatch.choose(problem(64, 64, torch.bfloat16, device="cuda")).backend == "sdpa"
    assert dispatch.choose(problem(32, 64, torch.bfloat16, device="cuda")).backend == "triton"
    assert dispatch.choose(problem(32, 512, torch.float16, device="cuda", dropout=0.1)).backend == "triton"
    assert dispatch.choose(problem(24, 64, torch.bfloat16, device="cuda")).backend == "cudnn"
    assert dispatch.choose(problem(24, 64, device="cuda")).backend == "tiled"
    assert dispatch.choose(problem(24, 256, torch.bfloat16, device="cuda")).backend == "tiled"


def test_auto_says_once_what_it_picked_and_why(caplog):
    dispatch._said.clear()
    q, v = normal(1, 2, 200, 12), normal(1, 2, 200, 24)
    with caplog.at_level(logging.INFO, logger="spa_dist.kernels.dispatch"):
        for _ in range(3):
            attention(q, q, v, scale=1.0)
    (record,) = caplog.records
    assert "tiled" in record.getMessage() and "d_qk 12, d_v 24" in record.getMessage() and "inference" in record.getMessage()


def test_what_auto_picks_for_short_sequences_writes_no_other_numbers():
    """Widened with zeros, written out, and tiled: the same outputs and gradients, at lengths around the crossover."""
    for length in (1, 64, 65, 128, 129):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (normal(2, 2, length, w, dtype=dtype, seed=i) for i, w in enumerate((16, 16, 32)))
            d_out = normal(2, 2, length, 32, dtype=dtype, seed=3)
            auto, tiled = (
                with_gradients(lambda *x, b=b: attention(*x, scale=0.3, causal=True, backend=b), q, k, v, d_out)
                for b in ("auto", "tiled")
            )
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            for a, b in zip(auto, tiled, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=2 * tolerance)


def test_the_model_names_the_key_when_a_backend_cannot_serve(monkeypatch):
    """The config's error for what only the run can know: here that there is no GPU."""
    from spa_dist.errors import ConfigError
    from spa_dist.model.attention import ParallelAttention

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    layer = ParallelAttention.__new__(ParallelAttention)
    torch.nn.Module.__init__(layer)
    layer.training, layer.scale = False, 1.0
    layer.config = SimpleNamespace(attention=SimpleNamespace(qk_norm=False, backend="triton"))
    layer._query_key_value = lambda x: (normal(1, 2, 8, 16), normal(1, 2, 8, 16), normal(1, 2, 8, 32))
    with pytest.raises(ConfigError, match=r"attention\.backend: .*CUDA device.*'auto'") as caught:
        layer(torch.zeros(8, 1, 4), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "words"),
    [("cudnn", "CUDA"), ("flex", "no backward on CPU"), ("magic", "choose one of")],
)
def test_a_backend_that_cannot_serve_says_why(backend, words):
    q, v = normal(1, 2, 8, 16).requires_grad_(), normal(1, 2, 8, 32)
    with pytest.raises(ValueError, match=words):
        attention(q, q, v, scale=1.0, backend=backend)


def test_flex_serves_unequal_widths_lengths_and_groups_in_inference():
    q, k, v = normal(2, 4, 64, 16), normal(2, 2, 64, 16, seed=1), normal(2, 2, 64, 32, seed=2)
    lengths = torch.tensor([64, 0])
    with torch.no_grad():
        out = attention(q, k, v, scale=0.3, causal=True, key_lengths=lengths, backend="flex")
    seen = torch.ones(2, 64, 64, dtype=torch.bool).tril()
    seen[1] = False
    torch.testing.assert_close(out.double(), oracle(q, k, v, seen, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_one_query_at_a_time_gives_the_rows_of_the_whole(dtype):
    """A cache larger than what is filled, with garbage behind it; grouped heads; lengths that differ by sequence."""
    q, k, v = normal(2, 4, 20, 8, dtype=dtype), normal(2, 2, 20, 8, dtype=dtype, seed=1), normal(2, 2, 20, 24, dtype=dtype)
    whole = attention(q, k, v, scale=0.3, causal=True)
    k_cache, v_cache = k.new_full((2, 2, 32, 8), torch.nan), v.new_full((2, 2, 32, 24), torch.nan)
    for n in range(20):
        k_cache[:, :, n], v_cache[:, :, n] = k[:, :, n], v[:, :, n]
        filled = torch.full((2,), n + 1)
        step = attention(q[:, :, n : n + 1], k_cache, v_cache, scale=0.3, key_lengths=filled)
        cut = attention(q[:, :, n : n + 1], k_cache[:, :, : n + 1], v_cache[:, :, : n + 1], scale=0.3, causal=True)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(step, whole[:, :, n : n + 1], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cut, whole[:, :, n : n + 1], rtol=tolerance, atol=tolerance)
