"""The attention module and folding, against loops written from the paper's equations."""

import copy
import math

import pytest
import torch
from torch import nn

from spa_dist.attention import (
    SparseProjectionAttention,
    apply_rotary,
    fold_projection,
    logit_scale,
    make_projection,
    project,
    rotary_tables,
)

WIDE = torch.float64


def module(**options) -> SparseProjectionAttention:
    """A small module in float64."""
    torch.manual_seed(0)
    settings = {"sparsity": 0.5, "head_dim": 8, "value_dim": 5, "bias": True, "scale": "unbiased"} | options
    return SparseProjectionAttention(12, 4, 6, **settings).to(WIDE)


def by_hand(layer, x, context=None, *, causal=False, key_lengths=None):
    """Algorithm 1, one query at a time."""
    context = x if context is None else context
    heads, groups, s = layer.num_heads, layer.num_kv_heads, layer.projection
    q = layer.query(x).unflatten(-1, (heads, -1))
    k = layer.key(context).unflatten(-1, (groups, -1))
    v = layer.value(context).unflatten(-1, (groups, -1))
    batch, queries, keys = x.shape[0], x.shape[1], context.shape[1]
    out = torch.zeros(batch, queries, heads, v.shape[-1], dtype=x.dtype)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            projection = s[g if s.shape[0] > 1 else 0]
            for i in range(queries):
                last = i + keys - queries if causal else keys - 1
                seen = [j for j in range(keys) if j <= last and (key_lengths is None or j < key_lengths[b])]
                if seen:
                    scores = torch.stack([(q[b, i, h] @ projection) @ (k[b, j, g] @ projection) for j in seen]) * layer.scale
                    out[b, i, h] = torch.softmax(scores, 0) @ v[b, seen, g]
    return layer.output(out.flatten(2))


CASES = [
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 2, "per": "head"},
    {"pattern": "head_specific"},
    {"pattern": "block", "block": (2, 2), "fold": False},
    {"pattern": "banded", "num_kv_heads": 1, "fold": False},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_module_is_algorithm_1(options, causal, cross):
    layer = module(**options)
    x = torch.randn(2, 5, 12, dtype=WIDE)
    context = torch.randn(2, 7, 12, dtype=WIDE) if cross else None
    lengths = torch.tensor([3, 0]) if not causal else None
    with torch.no_grad():
        result = layer(x, context, causal=causal, key_lengths=lengths)
        expected = by_hand(layer, x, context, causal=causal, key_lengths=lengths)
    assert torch.allclose(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"per": "head", "num_kv_heads": 2}, {"rope": True}])
@pytest.mark.parametrize("cross", [False, True])
def test_folded_and_unfolded_agree_forward_and_every_gradient(options, cross):
    folded = module(trainable=True, fold=True, **options)
    unfolded = copy.deepcopy(folded)
    unfolded.fold = False
    x = torch.randn(2, 6, 12, dtype=WIDE)
    context = torch.randn(2, 4, 12, dtype=WIDE) if cross else None
    results = []
    for layer in (folded, unfolded):
        inputs = [x.clone().requires_grad_()] + ([context.clone().requires_grad_()] if cross else [])
        out = layer(*inputs)
        weights = torch.linspace(-1, 1, out.numel(), dtype=WIDE).view_as(out)
        gradients = torch.autograd.grad((out * weights).sum(), [*inputs, *layer.parameters()])
        results.append([out, *gradients])
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fold", [True, False])
def test_the_gradient_of_s_has_a_term_for_queries_and_one_for_keys(fold):
    """∇_S = Qᵀ∇_{Q′} + Kᵀ∇_{K′}: the paper prints the first term alone."""
    s = make_projection("random", 8, 4, sparsity=0.5, seed=3).to(WIDE).requires_grad_()
    w_q, w_k = torch.randn(16, 12, dtype=WIDE), torch.randn(16, 12, dtype=WIDE)
    x, v = torch.randn(5, 12, dtype=WIDE), torch.randn(2, 5, 3, dtype=WIDE)
    if fold:
        q1, k1 = ((x @ fold_projection(w, s).T).view(5, 2, 4) for w in (w_q, w_k))
    else:
        q1, k1 = (project((x @ w.T).view(5, 2, 8), s) for w in (w_q, w_k))
    scores = torch.einsum("nhp,mhp->hnm", q1, k1) / 2
    loss = (torch.softmax(scores, -1) @ v).square().sum()
    (autograd,) = torch.autograd.grad(loss, s)

    q, k = (x @ w_q.T).view(5, 2, 8), (x @ w_k.T).view(5, 2, 8)
    q2, k2 = (torch.einsum("nhk,kp->nhp", t, s.detach()[0]).requires_grad_() for t in (q, k))
    out = torch.softmax(torch.einsum("nhp,mhp->hnm", q2, k2) / 2, -1) @ v
    delta_q, delta_k = torch.autograd.grad(out.square().sum(), [q2, k2])
    by_query, by_key = (torch.einsum("nhk,nhp->kp", t, d) for t, d in ((q, delta_q), (k, delta_k)))
    assert torch.allclose(autograd[0], by_query + by_key, rtol=0, atol=1e-12)
    assert by_key.abs().max() > 1e-3  # the term that the paper leaves out is not small


def test_a_trained_s_keeps_its_zeros():
    layer = module(trainable=True)
    before = layer.projection.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(2, 5, 12, dtype=WIDE)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.projection == 0, before == 0) and not torch.equal(layer.projection, before)


@pytest.mark.parametrize("rope", [False, True])
def test_the_future_leaves_the_past_bit_equal(rope):
    layer = module(rope=rope).eval()
    x = torch.randn(1, 9, 12, dtype=WIDE)
    changed = x.clone()
    changed[:, 6:] = torch.randn(1, 3, 12, dtype=WIDE) * 100
    assert torch.equal(layer(x, causal=True)[:, :6], layer(changed, causal=True)[:, :6])


def test_rotary_positions_are_relative():
    q, k = torch.randn(6, dtype=WIDE), torch.randn(6, dtype=WIDE)
    products = {}
    for offset in (0, 3, 50):
        cos, sin = rotary_tables(torch.tensor([4, 1]) + offset, 6, dtype=WIDE)
        a, b = apply_rotary(torch.stack([q, k]), cos, sin)
        products[offset] = float(a @ b)
    assert products[3] == pytest.approx(products[0], abs=1e-12) and products[50] == pytest.approx(products[0], abs=1e-12)
    # The pair (i, i + d/2) is a complex number turned by position · theta^(-2i/d).
    cos, sin = rotary_tables(torch.tensor([7]), 6, theta=100.0, dtype=WIDE)
    turned = apply_rotary(q[None], cos, sin)[0]
    for i in range(3):
        number = complex(q[i], q[i + 3]) * complex(math.cos(7 * 100 ** (-2 * i / 6)), math.sin(7 * 100 ** (-2 * i / 6)))
        assert turned[i].item() == pytest.approx(number.real) and turned[i + 3].item() == pytest.approx(number.imag)


def test_scales():
    assert (
        logit_scale("paper", 64, 16) == 0.25 and logit_scale("unbiased", 64, 16) == 0.125 and logit_scale(0.5, 64, 16) == 0.5
    )


def test_it_fits_into_other_peoples_models():
    layer = module(scale="paper", num_kv_heads=2)
    text = repr(layer)
    assert "random" in text and "density" in text and "6" in text
    other = module(scale="paper", num_kv_heads=2, seed=9)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 12, dtype=WIDE)
    assert torch.equal(nn.Sequential(other)(x), layer(x))
    half = copy.deepcopy(layer).bfloat16()
    assert torch.allclose(half(x.bfloat16()).double(), layer(x), atol=0.05)


def test_dropout_follows_the_global_seed():
    layer = module(dropout=0.5)
    x = torch.randn(1, 8, 12, dtype=WIDE)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(layer(x))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(layer.eval()(x), layer(x))
