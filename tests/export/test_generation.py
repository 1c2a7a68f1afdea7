"""Generation: the cache, batches and padding change nothing; sampling follows the distribution it is asked for."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.model import KVCache, PlainModel, generate, sample
from tests.export.synthetic_run import make_run

POSITIONS = ("rope", "learned", "none")
PROMPTS = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlainModel]:
    return {positions: _model(tmp_path_factory.mktemp(positions), positions) for positions in POSITIONS}


def _model(folder: Path, positions: str) -> PlainModel:
    run = make_run(folder, {"model.positions": positions, "model.tie_embeddings": False})
    return load_plain_model(open_checkpoint(run.folder), fold=positions != "none").double()


@settings(max_examples=12)
@given(PROMPTS, st.sampled_from(POSITIONS), st.sampled_from([0.0, 1.3]))
def test_cache_and_batch_change_nothing(
    models: dict[str, PlainModel], prompts: list[list[int]], positions: str, heat: float
) -> None:
    model = models[positions]
    options = {"max_new_tokens": 8, "temperature": heat, "top_p": 0.9}
    cached = generate(model, prompts, seed=7, **options)
    assert cached == generate(model, prompts, seed=7, use_cache=False, **options)
    for row, prompt in enumerate(prompts):
        assert generate(model, [prompt], seed=7 + row, **options) == [cached[row]]


@torch.inference_mode()
@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(0, 5), st.integers(0, 5), st.sampled_from(POSITIONS)
)
def test_padding_on_either_side(
    models: dict[str, PlainModel], row: list[int], left: int, right: int, positions: str
) -> None:
    model = models[positions]
    tokens = torch.tensor([[9] * left + row + [9] * right, [5] * (left + len(row) + right)])
    mask = torch.ones_like(tokens)
    mask[0, :left] = 0
    mask[0, left + len(row) :] = 0
    padded = model(tokens, mask=mask)
    assert torch.allclose(padded[0, left : left + len(row)], model(torch.tensor([row]))[0], rtol=0, atol=1e-10)
    assert torch.allclose(padded[1], model(tokens[1:])[0], rtol=0, atol=1e-10)


@torch.inference_mode()
def test_cache_in_pieces_and_its_size(models: dict[str, PlainModel]) -> None:
    """A prompt fed in pieces gives the logits of the whole, and the cache holds d_qk + d_v numbers per head and token."""
    model = models["rope"]
    tokens = torch.randint(0, 61, (2, 12))
    cache = KVCache(model.config, 2, 12, model.embedding.weight)
    pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 4, 2], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), model(tokens), rtol=0, atol=1e-10)
    assert cache.keys.numel() + cache.values.numel() == 2 * 2 * 4 * 12 * (4 + 6)


def test_the_future_is_not_seen(models: dict[str, PlainModel]) -> None:
    tokens = torch.randint(0, 61, (1, 10))
    other = tokens.clone()
    other[0, 6:] = (other[0, 6:] + 1) % 61
    for model in models.values():
        assert torch.equal(model(tokens)[0, :6], model(other)[0, :6])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.7)])
def test_sampling_follows_its_distribution(top_k: int, top_p: float) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.1, -3.0])
    temperature, draws = 0.7, 20_000
    probability = torch.softmax(logits.double() / temperature, 0).tolist()
    order = sorted(range(6), key=lambda token: -probability[token])[: top_k or 6]
    kept, total = [], 0.0
    mass = sum(probability[token] for token in order)
    for token in order:
        if total < top_p * mass:
            kept.append(token)
        total += probability[token]
    expected = [probability[t] / sum(probability[k] for k in kept) if t in kept else 0.0 for t in range(6)]
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(draws, 6).contiguous(), temperature, top_k, top_p, [generator] * draws)
    counts = torch.bincount(drawn, minlength=6)
    for token, share in enumerate(expected):
        deviation = (draws * share * (1 - share)) ** 0.5
        assert abs(int(counts[token]) - draws * share) <= 5 * deviation, (token, counts, expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy(models: dict[str, PlainModel], temperature: float) -> None:
    prompts = [[3, 4], [5]]
    expected = generate(models["rope"], prompts, max_new_tokens=6)
    assert generate(models["rope"], prompts, max_new_tokens=6, temperature=temperature) == expected


def test_greedy_ends_at_end_of_text_and_streams(models: dict[str, PlainModel]) -> None:
    model = models["rope"]
    free = generate(model, [[3, 4], [5]], max_new_tokens=6)
    assert model.config.eos_id == 1
    logits = model(torch.tensor([[3, 4, *free[0]]]))[0]
    assert free[0] == logits[1 : 1 + len(free[0])].argmax(-1).tolist()
    seen: list[tuple[int, int]] = []
    generate(model, [[3, 4], [5]], max_new_tokens=6, on_token=lambda row, token: seen.append((row, token)))
    assert [[token for row, token in seen if row == r] for r in range(2)] == free


def test_end_of_text_is_left_out(tmp_path: Path) -> None:
    model = _model(tmp_path, "rope")
    model.head.weight.data.zero_()  # type: ignore[union-attr]
    model.head.weight.data[1] = model.norm.bias.data  # type: ignore[union-attr]
    model.norm.weight.data.zero_()  # the logit of token 1 is then |bias|², of the others 0
    assert generate(model, [[3], [4, 5]], max_new_tokens=5) == [[], []]


def test_requests_that_do_not_fit(models: dict[str, PlainModel]) -> None:
    cases = [
        ({"prompts": [[]]}, "no tokens"),
        ({"prompts": [[61]]}, "vocabulary"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 31}, "learned positions"),
        ({"seed": 2**63}, "64 bits"),
    ]
    for changes, word in cases:
        with pytest.raises(ValueError, match=word):
            generate(models["learned"], **({"prompts": [[1, 2]]} | changes))  # type: ignore[arg-type]
    assert len(generate(models["learned"], [[3, 2]], max_new_tokens=30)[0]) <= 30
    with pytest.raises(ValueError, match="no memory for a cache"):
        generate(models["rope"], [[3, 2]], max_new_tokens=2**50)
