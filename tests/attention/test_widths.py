"""The registry of attention kinds, the logits' scale, and the scale of the learning rate."""

import math

import pytest
import torch

from spa_dist.attention import KINDS, logit_scale, make_projection, query_key_lr_scale, query_key_width


def test_widths_of_the_kinds():
    assert {kind: query_key_width(kind, 64, 16) for kind in KINDS} == {"spa": 16, "dense": 64, "thin": 16}
    assert [kind for kind in KINDS if KINDS[kind].has_projection] == ["spa"]
    with pytest.raises(ValueError, match="unknown attention kind 'dens'; did you mean 'dense'"):
        query_key_width("dens", 64, 16)


def test_scales():
    assert logit_scale("paper", 64, 16) == 0.25
    assert logit_scale("unbiased", 64, 16) == 0.125
    assert logit_scale(0.5, 64, 16) == 0.5
    assert logit_scale(2, 64, 16) == 2.0


@pytest.mark.parametrize("scale", ["papr", 0, -1.0, math.inf, math.nan, True, None])
def test_a_scale_that_is_none_of_these_is_refused(scale):
    with pytest.raises(ValueError, match="'paper', 'unbiased' or a positive number"):
        logit_scale(scale, 64, 16)


@pytest.mark.parametrize("scale", ["match", 0, -1.0, math.inf, math.nan, True, None])
def test_a_learning_rate_scale_that_is_none_of_these_is_refused(scale):
    with pytest.raises(ValueError, match="'matched' or a positive number"):
        query_key_lr_scale(scale, "spa", 64, 16)


def test_learning_rate_scales():
    assert query_key_lr_scale("matched", "spa", 64, 16) == 0.25
    assert query_key_lr_scale("matched", "thin", 64, 16) == query_key_lr_scale("matched", "dense", 64, 16) == 1.0
    assert query_key_lr_scale(0.5, "thin", 64, 16) == 0.5


@pytest.mark.parametrize("d_proj", [32, 16, 8])
@pytest.mark.parametrize("pattern", ["gaussian", "random"])
def test_at_the_matched_rate_folded_weights_move_as_thin_ones_do(pattern, d_proj):
    """One gradient step on W_Q, by gradient descent and by signs (Adam's first), seen on W_Q·S, along the gradient of W_Q·S."""
    generator = torch.Generator().manual_seed(0)
    scale = query_key_lr_scale("matched", "spa", 64, d_proj)
    moved = {"descent": [], "signs": []}
    for seed in range(40):
        s = make_projection(pattern, 64, d_proj, sparsity=0.8, seed=seed)[0].double()
        thin = torch.randn(200, d_proj, dtype=torch.float64, generator=generator)  # the gradient of W_Q·S, and of a thin W_Q
        own = thin @ s.T  # that of W_Q
        moved["descent"].append(float((scale * own @ s * thin).sum() / (thin * thin).sum()))
        moved["signs"].append(float((scale * own.sign() @ s * thin).sum() / (thin.sign() * thin).sum()))
    assert sum(moved["descent"]) / 40 == pytest.approx(1.0, abs=0.03)
    assert sum(moved["signs"]) / 40 == pytest.approx(1.0, abs=0.1 if pattern == "gaussian" else 0.25)
