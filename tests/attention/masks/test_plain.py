"""A learned S in a plain PyTorch loop: the module folded and unfolded, gradients by finite differences, pruning with its moments."""

import pytest
import torch

from spa_dist.attention import SparseProjectionAttention
from spa_dist.attention.masks import (
    METHODS,
    LearnedProjection,
    MaskMethod,
    PruningSchedule,
    mask_penalty,
    set_step,
    update_masks,
)


def module(method: str, pattern: str = "adaptive", **options) -> SparseProjectionAttention:
    torch.manual_seed(4)
    attention = SparseProjectionAttention(
        16,
        4,
        4,
        head_dim=6,
        num_kv_heads=2,
        pattern=pattern,
        mask=MaskMethod(method),
        bias=True,
        backend="reference",
        **options,
    )
    if attention.gate is not None:
        torch.nn.init.normal_(attention.gate)
    return attention.double()


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("method", METHODS)
def test_folded_is_unfolded_with_every_gradient(method: str, per: str) -> None:
    """Sampled gates included, which are the same in both; float64."""
    torch.manual_seed(0)
    x, found = torch.randn(2, 5, 16, dtype=torch.float64), []
    for fold in (True, False):
        attention = module(method, per=per, fold=fold, start="random", start_sparsity=0.3)
        set_step(attention, 3)
        y = attention(x, causal=True)
        parameters = dict(attention.named_parameters())
        found.append((y, torch.autograd.grad((y * y.detach().cos()).sum(), list(parameters.values()))))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-12)
    for folded, unfolded in zip(found[0][1], found[1][1]):
        assert torch.allclose(folded, unfolded, atol=1e-11)


@pytest.mark.parametrize("method", ["l0", "magnitude", "none"])
def test_gradients_of_gates_weights_and_logits_are_the_finite_differences(method: str) -> None:
    """Of W, of the temperatures g, and of hard concrete logits; Gumbel's is a straight-through estimate and has none."""
    attention, x = module(method), torch.randn(1, 3, 16, dtype=torch.float64)
    set_step(attention, 1)
    assert attention.gate is not None
    names = ["gate"] + [f"projection.{name}" for name, _ in attention.projection.named_parameters()]  # type: ignore[union-attr]
    parameters = dict(attention.named_parameters())

    def loss() -> torch.Tensor:
        return attention(x, causal=True).square().sum() + 0.1 * mask_penalty(attention)

    for name in names:
        (exact,) = torch.autograd.grad(loss(), parameters[name])
        flat = parameters[name].data.view(-1)
        for place in range(0, len(flat), max(1, len(flat) // 7)):
            values = []
            for step in (1e-4, -1e-4):
                flat[place] += step
                values.append(float(loss()))
                flat[place] -= step
            slope = (values[0] - values[1]) / 2e-4
            assert slope == pytest.approx(float(exact.reshape(-1)[place]), rel=1e-2 if method == "l0" else 1e-4, abs=2e-3)


def test_the_gate_is_a_temperature_of_each_head() -> None:
    """exp(g_h) multiplies head h's logits: with g = log 2 in one head, the logits of that head double and no other's change."""
    plain, gated = module("none", "learned"), module("none")
    assert plain.gate is None and gated.gate is not None
    gated.load_state_dict(plain.state_dict() | {"gate": torch.zeros(4)})
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert torch.equal(plain(x), gated(x))
    with torch.no_grad():
        gated.gate[1] = torch.log(torch.tensor(2.0))
        plain.query.weight[6:12] *= 2
        plain.query.bias[6:12] *= 2
    assert torch.allclose(plain(x), gated(x), atol=1e-12)


def test_pruning_in_a_plain_loop_reaches_its_target_with_clean_moments() -> None:
    attention = module("magnitude", "learned")
    schedule = PruningSchedule(0.75, 0, 12, 3, regrow=0.5)
    optimizer = torch.optim.AdamW(attention.parameters(), lr=1e-2)
    projection = attention.projection
    assert isinstance(projection, LearnedProjection)
    updates = 0
    for step in range(1, 15):
        set_step(attention, step, schedule)
        assert projection.collects_gradient == (step in (3, 6, 9, 12))
        attention(torch.randn(2, 5, 16, dtype=torch.float64)).square().mean().backward()
        assert (projection.dense_gradient is not None) == projection.collects_gradient
        optimizer.step()
        if update_masks(attention, step, schedule, optimizer):
            updates += 1
            off = projection.mask == 0
            state = optimizer.state[projection.weight]
            for tensor in (projection.weight, state["exp_avg"], state["exp_avg_sq"]):
                assert not bool(tensor[off].any())
        optimizer.zero_grad()
    assert updates == 4 and int(projection.mask.sum()) == 6
    assert bool((projection.weight[projection.mask.bool()] != 0).all())


def test_the_penalty_closes_gates() -> None:
    """Alone, it drives every logit down; the mean is the sum over the number of gates."""
    attention = module("gumbel", "learned")
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.5)
    for step in range(1, 30):
        set_step(attention, step)
        attention(torch.randn(1, 2, 16, dtype=torch.float64))
        mean, total = mask_penalty(attention), mask_penalty(attention, reduction="sum")
        assert float(total) == pytest.approx(24 * float(mean))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    attention.eval()
    assert not bool(attention.projection().any())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "learned"}, "pattern 'learned' and mask do not fit"),
        ({"pattern": "random", "mask": MaskMethod("none")}, "pattern 'random' and mask do not fit"),
        ({"pattern": "learned", "mask": MaskMethod("none"), "start": "gausian"}, "unknown pattern 'gausian'; did you mean"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SparseProjectionAttention(16, 4, 4, head_dim=6, **arguments)
    assert "\n" not in str(error.value)


def test_wrong_methods_are_one_line() -> None:
    for make in (lambda: MaskMethod("gumble"), lambda: MaskMethod("l0", initial_probability=0.4)):
        with pytest.raises(ValueError, match=r"unknown mask method 'gumble'; did you mean 'gumbel'|initial_probability"):
            make()
