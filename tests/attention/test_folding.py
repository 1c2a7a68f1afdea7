"""S applied to activations, folded into weights, and trained on its support."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention import fold_projection, make_projection, on_support, project

WIDE = torch.float64


@settings(deadline=None, max_examples=40)
@given(groups=st.integers(1, 3), share=st.integers(1, 3), d_k=st.integers(1, 7), width=st.integers(1, 6), data=st.data())
def test_folding_and_projecting_are_head_by_head_products(groups, share, d_k, width, data):
    """Head h uses S[h // (H // G)], for weights, biases and activations; folded equals unfolded to 1e-12."""
    d_proj, heads = data.draw(st.integers(1, d_k)), groups * share
    s = make_projection("random", d_k, d_proj, num_heads=groups, sparsity=0.3).to(WIDE)
    weight, bias = torch.randn(heads * d_k, width, dtype=WIDE), torch.randn(heads * d_k, dtype=WIDE)
    x = torch.randn(2, 3, width, dtype=WIDE)
    expected_weight = torch.cat([s[h // share].T @ weight[h * d_k : (h + 1) * d_k] for h in range(heads)])
    expected_bias = torch.cat([s[h // share].T @ bias[h * d_k : (h + 1) * d_k] for h in range(heads)])
    assert torch.allclose(fold_projection(weight, s), expected_weight, rtol=0, atol=1e-12)
    assert torch.allclose(fold_projection(bias, s), expected_bias, rtol=0, atol=1e-12)
    unfolded = project((x @ weight.T + bias).unflatten(-1, (heads, d_k)), s)
    assert unfolded.shape == (2, 3, heads, d_proj)
    folded = x @ fold_projection(weight, s).T + fold_projection(bias, s)
    assert torch.allclose(unfolded.flatten(-2), folded, rtol=0, atol=1e-12)


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
    assert torch.allclose(autograd[0], by_query + by_key, rtol=1e-12, atol=1e-12)
    assert by_key.abs().max() > 1e-3  # the term that the paper leaves out is not small


def test_a_pinned_support_passes_gradients_to_the_nonzeros_only():
    """S = M ⊙ W: ∇_W = M ⊙ ∇_S, and the value is S itself."""
    s = torch.tensor([[[0.5, 0.0], [0.0, -2.0]]], requires_grad=True)
    value = on_support(s)
    assert torch.equal(value, s)
    (value * torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).sum().backward()
    assert torch.equal(s.grad, torch.tensor([[[1.0, 0.0], [0.0, 4.0]]]))


def test_s_takes_the_dtype_of_what_it_is_applied_to():
    s = make_projection("random", 4, 2)
    assert fold_projection(torch.randn(8, 3, dtype=torch.bfloat16), s).dtype == torch.bfloat16
    assert project(torch.randn(5, 2, 4, dtype=WIDE), s).dtype == WIDE


def test_shapes_that_do_not_fit_are_one_line():
    s = make_projection("random", 4, 2, num_heads=3)
    with pytest.raises(ValueError, match=r"weight \[8, 5\] .* multiple of 12"):
        fold_projection(torch.randn(8, 5), s)
    with pytest.raises(ValueError, match=r"\[4, 4\].*3 projection"):
        project(torch.randn(2, 4, 4), s)
    with pytest.raises(ValueError, match=r"\[3, 5\].*width 4"):
        project(torch.randn(2, 3, 5), s)
