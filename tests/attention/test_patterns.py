"""The structure of each pattern, checked against its definition."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention import make_projection, projection_report
from spa_dist.attention.patterns.coverage import cover

shapes = st.integers(1, 40).flatmap(lambda d_k: st.tuples(st.just(d_k), st.integers(1, d_k)))
sparsities = st.floats(0, 1, exclude_max=True)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.integers(0, 10**6))
def test_cover_fills_every_row_and_column_with_one_move_each(rows, columns, share, seed):
    generator = torch.Generator().manual_seed(seed)
    count = max(rows, columns, round(share * rows * columns))
    mask = torch.zeros(rows * columns, dtype=torch.bool)
    mask[torch.randperm(rows * columns, generator=generator)[:count]] = True
    mask = mask.view(rows, columns)
    before = mask.clone()
    covered, moved = cover(mask, torch.rand(rows, columns, generator=generator))
    assert torch.equal(mask, before), "the argument is left alone"
    assert covered.any(0).all() and covered.any(1).all()
    assert covered.sum() == count
    assert moved == int((~mask.any(0)).sum() + (~mask.any(1)).sum())
    assert (covered & ~mask).sum() <= moved


def test_cover_refuses_what_cannot_be_covered():
    with pytest.raises(ValueError, match="2 non-zeros cannot cover 3 rows"):
        cover(torch.tensor([[True], [True], [False]]), torch.rand(3, 1))


@settings(deadline=None, max_examples=80)
@given(shapes, st.tuples(st.integers(1, 9), st.integers(1, 9)), sparsities, st.integers(0, 10**6))
def test_block_supports_are_whole_blocks_and_no_single_block_would_bring_the_density_nearer(shape, block, sparsity, seed):
    d_k, d_proj = shape
    support = make_projection("block", d_k, d_proj, block=block, sparsity=sparsity, seed=seed)[0] != 0
    tops, lefts = range(0, d_k, block[0]), range(0, d_proj, block[1])
    cells = {(t, left): support[t : t + block[0], left : left + block[1]] for t in tops for left in lefts}
    assert all(bool(cell.all()) or not bool(cell.any()) for cell in cells.values())
    target = (1 - sparsity) * d_k * d_proj
    error = abs(int(support.sum()) - target)
    for (top, left), cell in cells.items():
        changed = support.clone()
        changed[top : top + block[0], left : left + block[1]] ^= True
        if changed.any(0).all() and changed.any(1).all():
            assert abs(int(changed.sum()) - target) >= error - 1e-6, (top, left, cell.numel())


@settings(deadline=None, max_examples=60)
@given(shapes, st.data())
def test_a_band_is_the_set_of_its_definition(shape, data):
    d_k, d_proj = shape
    width = data.draw(st.integers(1, 2 * d_proj))
    support = make_projection("banded", d_k, d_proj, bandwidth=width)[0] != 0
    for i in range(d_k):
        centre = (i + Fraction(1, 2)) * Fraction(d_proj, d_k) - Fraction(1, 2)
        expected = [-Fraction(width, 2) <= j - centre < Fraction(width, 2) for j in range(d_proj)]
        assert support[i].tolist() == expected
    if width == 2 * d_proj:
        assert support.all()


@settings(deadline=None, max_examples=40)
@given(shapes, sparsities)
def test_a_band_without_a_width_takes_the_nearest_density(shape, sparsity):
    d_k, d_proj = shape
    target = (1 - sparsity) * d_k * d_proj
    error = abs(int((make_projection("banded", d_k, d_proj, sparsity=sparsity) != 0).sum()) - target)
    for width in range(1, 2 * d_proj + 1):
        assert error <= abs(int((make_projection("banded", d_k, d_proj, bandwidth=width) != 0).sum()) - target)


@settings(deadline=None, max_examples=80)
@given(shapes, st.integers(1, 7), sparsities)
def test_hierarchical_columns_pool_runs_at_consecutive_powers_of_two(shape, levels, sparsity):
    d_k, d_proj = shape
    levels = min(levels, d_proj, (d_k - 1).bit_length() + 1)
    support = make_projection("hierarchical", d_k, d_proj, levels=levels, sparsity=sparsity)[0] != 0
    runs = []
    for column in support.T.tolist():
        first, length = column.index(True), sum(column)
        assert all(column[first : first + length]), "one run of neighbours"
        runs.append(length)
    assert runs == sorted(runs), "groups from fine to coarse"
    finest = min(runs)
    assert sorted(set(runs)) == sorted({min(finest * 2**level, d_k) for level in range(levels)})
    assert finest == d_k or finest & (finest - 1) == 0
    coarsest = support[:, torch.tensor(runs) == max(runs)]
    assert coarsest.any(1).all(), "the coarsest group sees every feature"


@settings(deadline=None, max_examples=80)
@given(shapes, st.data())
def test_conv_shares_one_kernel_along_the_diagonal_and_has_full_rank(shape, data):
    d_k, d_proj = shape
    size = data.draw(st.integers(-(-d_k // d_proj), d_k))
    s = make_projection("conv", d_k, d_proj, kernel_size=size, seed=data.draw(st.integers(0, 99)))
    weights = (s[0] * (s[0] != 0).sum(1, keepdim=True).sqrt()).round()
    kernel = weights[:size, 0]
    assert set(kernel.tolist()) <= {1.0, -1.0}
    for j in range(d_proj):
        start = j * d_k // d_proj
        expected = torch.zeros(d_k)
        expected[start : start + size] = kernel[: d_k - start]
        assert torch.equal(weights[:, j], expected)
    assert projection_report(s).rank == d_proj
