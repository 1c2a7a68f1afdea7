"""Gates against their distributions: expected density, and the gradient of the expected loss by enumeration."""

import itertools
import math

import pytest
import torch

from spa_dist.attention.masks import HardConcrete, LearnedProjection, MaskMethod, TemperatureSchedule
from spa_dist.attention.masks.gates import binary_concrete_sample
from spa_dist.attention.masks.noise import uniform_noise

SAMPLES = 400_000


def five_sigma(probability: torch.Tensor, samples: int) -> torch.Tensor:
    return 5 * (probability * (1 - probability) / samples).sqrt() + 1e-9


@pytest.mark.parametrize("constants", [(2 / 3, -0.1, 1.1), (0.5, -0.2, 1.3)])
def test_hard_concrete_density_is_its_monte_carlo_estimate(constants: tuple[float, float, float]) -> None:
    """P(z ≠ 0) in closed form against counting, gate by gate; and its sum against the mean number of non-zeros."""
    gates, logits = HardConcrete(*constants), torch.tensor([-6.0, -2.0, -0.5, 0.0, 1.0, 4.0])
    samples = gates.sample(logits, torch.rand(SAMPLES, len(logits)).clamp_(1e-7, 1 - 1e-7))
    counted, expected = (samples != 0).double().mean(0), gates.probability(logits).double()
    assert bool(((counted - expected).abs() <= five_sigma(expected, SAMPLES)).all()), (counted, expected)
    ones = torch.sigmoid(logits.double() + constants[0] * math.log((1 - constants[1]) / (constants[2] - 1)) * -1)
    assert bool((((samples == 1).double().mean(0) - ones).abs() <= five_sigma(ones, SAMPLES)).all())
    assert float(samples.min()) == 0.0 and float(samples.max()) == 1.0


def test_binary_gates_open_as_often_as_they_say_at_every_temperature() -> None:
    logits = torch.tensor([-3.0, -0.3, 0.0, 2.0])
    for temperature in (1.0, 0.1):
        samples = binary_concrete_sample(logits, torch.rand(SAMPLES, 4).clamp_(1e-7, 1 - 1e-7), temperature)
        assert set(samples.unique().tolist()) == {0.0, 1.0}
        expected = torch.sigmoid(logits.double())
        assert bool(((samples.double().mean(0) - expected).abs() <= five_sigma(expected, SAMPLES)).all())


def loss_of(masks: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A one-layer model: squared error of x (M ⊙ W) for each of a batch of masks [S, d_k, d_k′]."""
    return ((torch.einsum("nk,skp->snp", x, masks * weight) - y) ** 2).mean((1, 2))


def test_the_gumbel_gradient_is_the_exact_one() -> None:
    """The exact gradient of the expected loss sums over all 2⁶ masks. At a low temperature the estimator's mean is it; at a high one
    it is not, which shows that the test can tell."""
    torch.manual_seed(3)
    weight, x, y = torch.randn(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    logits = (torch.randn(3, 2) * 0.7).double().requires_grad_()
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6))).view(-1, 3, 2)
    p = torch.sigmoid(logits)
    chances = torch.where(masks.bool(), p, 1 - p).flatten(1).prod(1)
    (exact,) = torch.autograd.grad((chances * loss_of(masks, weight, x, y).double()).sum(), logits)

    def mean_gradient(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        own = logits.detach().float().expand(SAMPLES, 3, 2).clone().requires_grad_()
        gates = binary_concrete_sample(own, torch.rand(SAMPLES, 3, 2).clamp_(1e-7, 1 - 1e-7), temperature)
        (gradient,) = torch.autograd.grad(loss_of(gates, weight, x, y).sum(), own)
        return gradient.double().mean(0), gradient.double().std(0) / math.sqrt(SAMPLES)

    cold, error = mean_gradient(0.05)
    assert bool(((cold - exact).abs() <= 5 * error + 0.01 * exact.abs().max()).all()), (cold, exact, error)
    hot, error = mean_gradient(1.0)
    assert bool(((hot - exact).abs() > 5 * error + 0.01 * exact.abs().max()).any())


@pytest.mark.parametrize("name", ["gumbel", "l0"])
def test_a_module_starts_at_its_probability_and_evaluates_without_noise(name: str) -> None:
    method = MaskMethod(name, TemperatureSchedule(1.0, 0.1, 0, 100), initial_probability=0.8)
    start = torch.randn(2, 8, 4) * (torch.rand(2, 8, 4) < 0.5)
    projection = LearnedProjection(method, (2, 8, 4), seed=1, name="layers.0")
    projection.load_state_dict(method.initial(start))
    on = start != 0
    probability = method.probability(projection.mask_logits.detach())
    assert torch.allclose(probability[on], torch.tensor(0.8)) and torch.allclose(probability[~on], torch.tensor(0.2))
    projection.eval()
    evaluated = projection()
    assert torch.equal(evaluated != 0, on) and projection.expected_nonzeros is None
    if name == "gumbel":
        assert torch.equal(evaluated, start)
    projection.train()
    first = [projection().detach() for _ in range(2)]
    assert torch.equal(*first) and float(projection.expected_nonzeros) == pytest.approx(float(probability.sum()), rel=1e-6)
    projection.step = 1
    assert not torch.equal(projection(), first[0])


def test_noise_is_a_function_of_seed_name_and_step_and_splits_by_heads() -> None:
    whole = uniform_noise(3, "layers.1", 7, (4, 8, 4))
    assert torch.equal(whole, uniform_noise(3, "layers.1", 7, (4, 8, 4)))
    for other in ((4, "layers.1", 7), (3, "layers.2", 7), (3, "layers.1", 8)):
        assert not torch.equal(whole, uniform_noise(*other, (4, 8, 4)))
    many = uniform_noise(0, "x", 0, (1000, 64, 32))
    assert float(many.min()) > 0 and float(many.max()) < 1 and float(many.mean()) == pytest.approx(0.5, abs=1e-3)
    assert bool(torch.isfinite(many.log() - (-many).log1p()).all())
