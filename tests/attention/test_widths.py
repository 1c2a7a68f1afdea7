"""The registry of attention kinds and the logits' scale."""

import math

import pytest

from spa_dist.attention import KINDS, logit_scale, query_key_width


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
