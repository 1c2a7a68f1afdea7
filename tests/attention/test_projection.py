"""E[S Sᵀ] = I, coverage, density and purity of every pattern, over shapes and seeds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention import PATTERNS, make_projection, num_projections, projection_report

# (pattern, options, d_k, d_proj, sparsity): shapes that divide and that do not, sparse enough for the repair to act.
CASES = [
    *[(pattern, {}, 12, 5, 0.8) for pattern in sorted(PATTERNS)],
    *[(pattern, {}, 16, 8, 0.95) for pattern in sorted(PATTERNS)],
    *[(pattern, {}, 6, 6, 0.5) for pattern in sorted(PATTERNS)],
    ("block", {"block": (3, 2)}, 10, 7, 0.6),
    ("banded", {"bandwidth": 4}, 11, 6, 0.8),
    ("hierarchical", {"levels": 4}, 16, 8, 0.7),
    ("conv", {"kernel_size": 9}, 14, 6, 0.8),
]


def z_scores(samples: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|mean over dim 0 - expected| in standard errors; infinite where there is a difference and no spread."""
    samples = samples.double()
    difference = (samples.mean(0) - expected).abs()
    difference[difference < 1e-6] = 0
    return torch.where(difference == 0, 0.0, difference / (samples.std(0) / math.sqrt(len(samples))))


@pytest.mark.parametrize(("pattern", "options", "d_k", "d_proj", "sparsity"), CASES)
def test_the_expectation_of_s_s_transpose_is_the_identity(pattern, options, d_k, d_proj, sparsity):
    draws = [make_projection(pattern, d_k, d_proj, num_heads=20, sparsity=sparsity, seed=s, **options) for s in range(60)]
    s = torch.cat(draws).double()
    # 5.5 standard errors over at most 256 entries: a false alarm once in 100,000 sets of seeds; these seeds are fixed.
    assert z_scores(s @ s.mT, torch.eye(d_k)).max() < 5.5


@pytest.mark.parametrize("pattern", ["random", "head_specific", "gaussian"])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_every_entry_has_variance_one_over_d_proj(pattern, sparsity):
    """Theorem 1 asks for variance exactly 1/d_k′; a repair that favoured some columns would break it."""
    s = make_projection(pattern, 10, 6, num_heads=1500, sparsity=sparsity).double()
    assert z_scores(s, torch.zeros(10, 6)).max() < 5
    assert z_scores(s**2, torch.full((10, 6), 1 / 6)).max() < 5


@pytest.mark.parametrize(("pattern", "options", "d_k", "d_proj", "sparsity"), [c for c in CASES if c[0] != "gaussian"])
def test_rows_have_norm_one_and_entries_of_one_size(pattern, options, d_k, d_proj, sparsity):
    s = make_projection(pattern, d_k, d_proj, num_heads=3, sparsity=sparsity, seed=1, **options).double()
    counts = (s != 0).sum(-1, keepdim=True).double()
    assert torch.allclose(s.abs(), (s != 0) / counts.sqrt(), rtol=0, atol=1e-7)
    assert torch.allclose(s.norm(dim=-1), torch.ones(3, d_k).double(), atol=1e-7)


shapes = st.integers(1, 40).flatmap(lambda d_k: st.tuples(st.just(d_k), st.integers(1, d_k)))
sparsities = st.floats(0, 1, exclude_max=True)


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(sorted(PATTERNS)), shapes, sparsities, st.integers(-(2**70), 2**70))
def test_no_row_or_column_is_empty_and_the_report_counts_right(pattern, shape, sparsity, seed):
    s = make_projection(pattern, *shape, num_heads=2, sparsity=sparsity, seed=seed)
    assert s.shape == (2, *shape) and s.dtype == torch.float32
    by_hand = [[[value != 0 for value in row] for row in head] for head in s.tolist()]
    assert all(any(row) for head in by_hand for row in head)
    assert all(any(column) for head in by_hand for column in zip(*head))
    report = projection_report(s)
    assert report.nonzeros == sum(value for head in by_hand for row in head for value in row)
    assert report.density == report.nonzeros / (2 * shape[0] * shape[1])
    assert (report.empty_rows, report.empty_columns) == (0, 0)
    assert report.rank == min(int(torch.linalg.matrix_rank(head)) for head in s.double())


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["random", "head_specific"]), shapes, sparsities)
def test_a_random_pattern_has_exactly_the_asked_number_of_nonzeros_once_it_covers(pattern, shape, sparsity):
    report = projection_report(make_projection(pattern, *shape, sparsity=sparsity))
    assert report.nonzeros == max(round((1 - sparsity) * shape[0] * shape[1]), *shape)


def test_the_densities_of_the_paper():
    """Table 6's patterns at d_k = 64, d_k′ = 32, as asked or as near as the pattern comes."""
    measured = {
        (pattern, sparsity): projection_report(make_projection(pattern, 64, 32, sparsity=sparsity)).density
        for pattern in PATTERNS
        for sparsity in (0.8, 0.9, 0.95)
    }
    for sparsity in (0.8, 0.9, 0.95):
        for pattern in ("random", "head_specific", "hierarchical"):
            assert measured[pattern, sparsity] == pytest.approx(1 - sparsity, abs=1e-3)
        for pattern in ("conv", "banded"):
            assert measured[pattern, sparsity] == pytest.approx(1 - sparsity, abs=1 / 64)
        assert measured["gaussian", sparsity] == 1
    # 8 blocks of 8 × 8 are the fewest that meet 64 rows: more than 20 % of the 32 blocks.
    assert measured["block", 0.8] == 0.25
    assert projection_report(make_projection("block", 64, 32, block=(16, 4))).density == 0.25
    assert 0.4 < projection_report(make_projection("banded", 64, 32, bandwidth=16)).density <= 0.5


def test_heads_are_independent_draws_and_do_not_depend_on_how_many_there_are():
    for pattern in PATTERNS:
        many = make_projection(pattern, 24, 12, num_heads=4, seed=5)
        assert torch.equal(many[:2], make_projection(pattern, 24, 12, num_heads=2, seed=5))
        assert not torch.equal(many, make_projection(pattern, 24, 12, num_heads=4, seed=6))
        assert all(not torch.equal(many[a], many[b]) for a in range(4) for b in range(a))
    supports = make_projection("head_specific", 24, 12, num_heads=4) != 0
    assert all(not torch.equal(supports[a], supports[b]) for a in range(4) for b in range(a))


def test_a_draw_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = [make_projection(pattern, 16, 8) for pattern in PATTERNS]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    with torch.device("meta"):
        second = [make_projection(pattern, 16, 8) for pattern in PATTERNS]
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_the_stream_of_draws_is_pinned():
    """A run is a config and a seed: the same seed must give the same S tomorrow and on another machine."""
    signs = [["0+-"[int(value.sign())] for value in row] for row in make_projection("random", 5, 3, sparsity=0.5, seed=7)[0]]
    assert ["".join(row) for row in signs] == PINNED_RANDOM
    gaussian = make_projection("gaussian", 2, 2, seed=7)[0]
    assert torch.allclose(gaussian, torch.tensor(PINNED_GAUSSIAN), rtol=0, atol=1e-7)


PINNED_RANDOM = ["-0-", "+00", "+--", "0+0", "-00"]
PINNED_GAUSSIAN = [[-0.4411579668521881, 0.18979373574256897], [-1.4577652215957642, -0.01507092360407114]]


def test_repairs_are_reported_through_the_projection():
    dense_enough = projection_report(make_projection("random", 64, 32, sparsity=0.0))
    assert dense_enough.repaired == 0
    # At 95 % an expected 0.95^32 = 19 % of the 64 rows and 0.95^64 = 4 % of the 32 columns are empty before the repair.
    sparse = projection_report(make_projection("random", 64, 32, num_heads=50, sparsity=0.95))
    assert sparse.repaired / 50 == pytest.approx(64 * 0.95**32 + 32 * 0.95**64, abs=1.5)
    assert projection_report(torch.ones(1, 2, 2)).repaired is None


def test_a_report_on_a_matrix_known_by_hand():
    s = torch.tensor([[1.0, 0, 2], [0, 0, 0], [-1, 0, -2], [0, 0, 0]])
    report = projection_report(s)
    assert (report.nonzeros, report.rank, report.empty_rows, report.empty_columns) == (4, 1, 2, 1)
    assert report.density == 4 / 12


ERRORS = [
    (("radnom", 8, 4), {}, ["'radnom'", "did you mean 'random'", "hierarchical"]),
    (("zzz", 8, 4), {}, ["'zzz'", "one of banded"]),
    (("random", 8, 9), {}, ["d_proj = 9", "d_k = 8"]),
    (("random", 0, 0), {}, ["d_k", "positive", "0"]),
    (("random", 8, -1), {}, ["d_proj", "positive", "-1"]),
    (("random", 8, 2.0), {}, ["d_proj", "integer", "2.0"]),
    (("random", 8, 4), {"num_heads": 0}, ["num_heads", "positive"]),
    (("random", 8, 4), {"sparsity": 1.0}, ["sparsity", "[0, 1)", "1.0"]),
    (("random", 8, 4), {"sparsity": -0.1}, ["sparsity", "-0.1"]),
    (("random", 8, 4), {"sparsity": math.nan}, ["sparsity", "nan"]),
    (("random", 8, 4), {"sparsity": "0.8"}, ["sparsity", "'0.8'"]),
    (("random", 8, 4), {"seed": 1.5}, ["seed", "integer", "1.5"]),
    (("random", 8, 4), {"block": (2, 2)}, ["'random'", "'block'"]),
    (("banded", 8, 4), {"bandwith": 2}, ["'bandwith'", "did you mean 'bandwidth'"]),
    (("block", 8, 4), {"block": (0, 2)}, ["block", "(0, 2)"]),
    (("block", 8, 4), {"block": 4}, ["block", "4"]),
    (("banded", 8, 4), {"bandwidth": 9}, ["bandwidth", "8", "9"]),
    (("banded", 8, 4), {"bandwidth": 0}, ["bandwidth", "0"]),
    (("hierarchical", 8, 4), {"levels": 5}, ["levels", "4", "5"]),
    (("hierarchical", 8, 4), {"levels": 0}, ["levels", "0"]),
    (("conv", 8, 4), {"kernel_size": 1}, ["kernel_size", "2", "1"]),
    (("conv", 8, 4), {"kernel_size": 9}, ["kernel_size", "8", "9"]),
]


@pytest.mark.parametrize(("arguments", "options", "words"), ERRORS)
def test_a_bad_argument_is_one_line_that_names_it(arguments, options, words):
    with pytest.raises(ValueError) as error:
        make_projection(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_an_option_that_is_none_is_an_option_not_given():
    options = {"block": None, "bandwidth": None, "levels": None, "kernel_size": None}
    for pattern in PATTERNS:
        assert torch.equal(make_projection(pattern, 8, 4, **options), make_projection(pattern, 8, 4))


def test_how_many_projections_a_layer_holds():
    assert num_projections("random", "layer", 4) == 1
    assert num_projections("random", "head", 4) == 4
    assert num_projections("head_specific", "layer", 4) == 4
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        num_projections("random", "layr", 4)
    with pytest.raises(ValueError, match="unknown pattern 'bandd'"):
        num_projections("bandd", "layer", 4)


def test_measured_logits_at_the_two_scales():
    """On N(0, 1) inputs at 64 → 32 the logits' deviation is 1 exactly, about 1.74 unbiased and 2.46 at the paper's scale."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 400, 200, 64, generator=generator)
    s = make_projection("random", 64, 32, num_heads=400)
    products = (q @ s) @ (k @ s).mT
    assert float((products / math.sqrt(64)).std()) == pytest.approx(1.74, abs=0.03)
    assert float((products / math.sqrt(32)).std()) == pytest.approx(2.46, abs=0.04)
