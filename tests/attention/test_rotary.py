"""Rotary positions: relative, against complex numbers, exact far out."""

import math

import pytest
import torch

from spa_dist.attention import apply_rotary, rotary_tables

WIDE = torch.float64


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


def test_a_length_means_positions_from_zero_and_batches_of_positions_broadcast():
    for table, own in zip(rotary_tables(5, 4), rotary_tables(torch.arange(5), 4)):
        assert table.shape == (5, 2) and torch.equal(table, own)
    x = torch.randn(2, 3, 4, 6, dtype=WIDE)
    positions = torch.tensor([[0, 1, 2, 3], [5, 4, -3, 9]])
    cos, sin = rotary_tables(positions, 6, dtype=WIDE)
    together = apply_rotary(x, cos[:, None], sin[:, None])
    for b in range(2):
        assert torch.equal(together[b], apply_rotary(x[b], *rotary_tables(positions[b], 6, dtype=WIDE)))
    assert torch.equal(together[0, :, 0], x[0, :, 0]), "position 0 is no rotation"


def test_far_positions_keep_their_precision():
    """At position 1,000,003 a float32 product of position and frequency would be off by up to 0.03 radians."""
    position = 1_000_003
    cos, sin = rotary_tables(torch.tensor([position]), 8)
    for i in range(4):
        angle = position * 10000.0 ** (-2 * i / 8)
        assert float(cos[0, i]) == pytest.approx(math.cos(angle), abs=1e-7)
        assert float(sin[0, i]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_low_precision_inputs_are_rotated_in_the_tables_precision():
    x = torch.randn(3, 50, 8).bfloat16()
    tables = rotary_tables(50, 8)
    assert apply_rotary(x, *tables).dtype == torch.bfloat16
    assert torch.equal(apply_rotary(x, *tables), apply_rotary(x.float(), *tables).bfloat16())


@pytest.mark.parametrize("dim", [0, 3, -2])
def test_a_width_without_pairs_is_refused(dim):
    with pytest.raises(ValueError, match=f"even width, not {dim}"):
        rotary_tables(4, dim)
