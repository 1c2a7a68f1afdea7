"""Recall: what the questions ask, what the model computes, and how its masks are trained."""

import math

import pytest
import torch
from torch import Generator

from spa_dist.attention.masks import LearnedProjection
from spa_dist.comparison.jobs import Job
from spa_dist.comparison.recall import train
from spa_dist.comparison.recall.data import KEYS, VALUES, recall_batch
from spa_dist.comparison.recall.model import WIDTH, RecallModel, truncated
from spa_dist.comparison.variants import VARIANTS

SETTINGS = train.settings(8) | {"every": 2, "evaluate_every": 4, "held_out": 4, "sequences": 2}


def model_of(name: str, d_proj: int = 8) -> RecallModel:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    torch.manual_seed(3)
    return RecallModel(variant.attention(d_proj, SETTINGS), steps=8, seed=3)


@pytest.mark.parametrize("pairs", [1, 16, 96])
def test_answers_stand_beside_the_keys(pairs: int) -> None:
    """Looked up token by token."""
    context, questions, answers = recall_batch(20, pairs, Generator().manual_seed(1))
    orders = set()
    for sequence, asked, right in zip(context.tolist(), questions.tolist(), answers.tolist()):
        book = {sequence[i]: sequence[i + 1] - KEYS for i in range(0, len(sequence), 2)}
        assert len(book) == pairs == len(asked) and set(asked) == set(book)
        assert all(0 <= key < KEYS for key in book) and all(0 <= value < VALUES for value in book.values())
        assert [book[key] for key in asked] == right
        orders.add(tuple(sequence[::2].index(key) for key in asked))
    assert len(orders) == (1 if pairs == 1 else 20)
    assert not torch.equal(context[0], context[1])
    again = recall_batch(20, pairs, Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(again, (context, questions, answers)))


def test_a_sequence_has_a_key_for_each_pair() -> None:
    with pytest.raises(ValueError, match="1024 pairs"):
        recall_batch(1, KEYS + 1, Generator())


@pytest.mark.parametrize("scale", ["paper", "unbiased"])
def test_attention_is_the_formula(scale: str) -> None:
    """softmax(e^g · scale · (x W_Qᵀ S)(c W_Kᵀ S)ᵀ) c W_Vᵀ W_Oᵀ, written out."""
    attention = model_of(f"random + gate, {scale}").attention.double()
    torch.nn.init.constant_(attention.gate, 0.3)
    x, context = torch.randn(2, 3, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    s = attention.projection[0]
    q, k = x @ attention.query.weight.T @ s, context @ attention.key.weight.T @ s
    logits = q @ k.mT * math.exp(0.3) / math.sqrt(8 if scale == "paper" else WIDTH)
    expected = torch.softmax(logits, -1) @ context @ attention.value.weight.T @ attention.output.weight.T
    assert torch.allclose(attention(x, context), expected, rtol=0, atol=1e-12)


def test_the_convolution_sees_two_tokens() -> None:
    """A token's vector changes with itself and the one before it, and with no other."""
    model, tokens = model_of("dense"), torch.arange(6)[None]
    before = model.convolved(tokens)
    tokens[0, 2] = 99
    changed = (model.convolved(tokens) != before).any(-1)[0]
    assert changed.tolist() == [False, False, True, True, False, False]


def test_variants_start_alike() -> None:
    """What they share is drawn the same; a difference between two is not their embedding's."""
    first = model_of("dense").state_dict()
    for variant in VARIANTS:
        other = model_of(variant.name).state_dict()
        shared = [name for name in other if not name.startswith("attention.")]
        assert len(shared) > 5 and all(torch.equal(first[name], other[name]) for name in shared)


def test_truncation_keeps_the_product_as_far_as_its_rank() -> None:
    """The error of a rank is the rest of the spectrum (Eckart–Young)."""
    query, key = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    product = query.T @ key
    for rank in (16, 5):
        q, k = truncated(query, key, rank)
        assert q.shape == k.shape == (rank, WIDTH)
        rest = torch.linalg.svdvals(product)[rank:].square().sum().sqrt()
        assert torch.linalg.norm(product - q.T @ k) == pytest.approx(float(rest), abs=2e-3)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_each_variant_trains(variant) -> None:
    """Everything that should move does, and a pruned S ends at 20 % to one entry."""
    torch.manual_seed(1)
    section = variant.attention(8, SETTINGS)
    model = RecallModel(section, steps=8, seed=1)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer, data = train.make_optimizer(model, section, 1e-2), Generator().manual_seed(1)
    for step in range(1, 9):
        train.train_step(model, optimizer, recall_batch(2, 6, data), section, step, 8)
    still = [name for name, tensor in model.named_parameters() if torch.equal(tensor, before[name])]
    assert still == []
    projection = model.attention.projection
    if isinstance(projection, LearnedProjection) and variant.method == "magnitude":
        kept = projection.mask.bool()
        assert int(kept.sum()) == round(0.2 * WIDTH * 8)
        moments = optimizer.state[projection.weight]
        assert not projection.weight[~kept].any() and not moments["exp_avg"][~kept].any()


def test_it_is_solved_from_where_it_stays_solved() -> None:
    def curve(*values: float) -> list[dict]:
        return [{"step": 10 * i, "accuracy": value} for i, value in enumerate(values)]

    assert train.solved_at(curve(0.1, 0.995, 0.98, 0.99, 1.0)) == 30
    assert train.solved_at(curve(0.1, 1.0, 0.5)) is None
    assert train.solved_at(curve(1.0, 1.0)) == 0


def test_a_run_is_a_function_of_its_job() -> None:
    """And its costs are those counted by hand: d_k′ = 8, six pairs, a question of six."""
    job = Job("recall", "learned l0, unbiased", 8, 6, 0)
    one, two = train.run(job, SETTINGS), train.run(job, SETTINGS)
    assert one["curve"] == two["curve"] and [p["step"] for p in one["curve"]] == [0, 4, 8]
    assert train.run(Job("recall", job.variant, 8, 6, 1), SETTINGS)["curve"] != one["curve"]
    size, context, questions = WIDTH * WIDTH, 12, 6
    products = (context + questions) * 2 * size + context * (8 * WIDTH + size)
    products += questions * (8 * WIDTH + size + 64 * WIDTH) + questions * context * (8 + WIDTH)
    assert one["forward_flops_per_token"] == pytest.approx(2 * products / 18)
    rest = (1024 + 64) * WIDTH + 2 * size + 4 * WIDTH + 64 * WIDTH + 64
    assert one["folded_parameters"] == rest + 2 * 8 * WIDTH + 2 * size
    assert one["parameters"] == rest + 4 * size + 2 * 8 * WIDTH
    assert one["cache_numbers_per_token"] == 8 + WIDTH
