"""The attention module, against loops written from the paper's equations."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spa_dist.attention import SparseProjectionAttention

WIDE = torch.float64


def module(**options) -> SparseProjectionAttention:
    """A small module in float64."""
    torch.manual_seed(0)
    settings = {"sparsity": 0.5, "head_dim": 8, "value_dim": 5, "bias": True, "scale": "unbiased"} | options
    return SparseProjectionAttention(12, 4, 6, **settings).to(WIDE)


def turned(vector: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    """RoPE from its definition: the pair (i, i + d/2) is a complex number turned by position · theta^(-2i/d)."""
    half = len(vector) // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=WIDE)
    number = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones(half, dtype=WIDE), angles)
    return torch.cat([number.real, number.imag])


def by_hand(layer, x, context=None, *, causal=False, key_lengths=None):
    """Algorithm 1, one query at a time. A query that sees no key gives 0."""
    context = x if context is None else context
    heads, groups = layer.num_heads, layer.num_kv_heads
    s = layer.projection * (layer.projection != 0)
    q = layer.query(x).unflatten(-1, (heads, -1))
    k = layer.key(context).unflatten(-1, (groups, -1))
    v = layer.value(context).unflatten(-1, (groups, -1))
    batch, queries, keys = x.shape[0], x.shape[1], context.shape[1]
    shift = keys - queries if causal else 0
    rows = []
    for b, i, h in itertools.product(range(batch), range(queries), range(heads)):
        g = h // (heads // groups)
        projection = s[g if len(s) > 1 else 0]
        last = i + shift if causal else keys - 1
        seen = [j for j in range(keys) if j <= last and (key_lengths is None or j < key_lengths[b])]
        query, own_keys = q[b, i, h] @ projection, {j: k[b, j, g] @ projection for j in seen}
        if layer.rope:
            query, own_keys = turned(query, i + shift), {j: turned(key, j) for j, key in own_keys.items()}
        scores = torch.stack([query @ own_keys[j] * layer.scale for j in seen]) if seen else None
        rows.append(v.new_zeros(v.shape[-1]) if scores is None else torch.softmax(scores, 0) @ v[b, seen, g])
    return layer.output(torch.stack(rows).view(batch, queries, -1))


CASES = [
    {},
    {"num_kv_heads": 2, "rope": True},
    {"num_kv_heads": 2, "per": "head", "scale": "paper"},
    {"pattern": "head_specific", "rope": True, "bias": False},
    {"pattern": "block", "block": (2, 2), "fold": False, "per": "head"},
    {"pattern": "banded", "num_kv_heads": 1, "fold": False, "rope": True, "scale": 0.7},
]


def outputs_and_gradients(compute, layer, inputs) -> list[torch.Tensor]:
    """The output of compute(*inputs), and the gradient of an uneven sum of it to the inputs and every parameter."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    out = compute(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=WIDE).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [*inputs, *layer.parameters()])]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("keys", [None, 7, 3])
def test_module_is_algorithm_1_with_every_gradient(options, causal, padded, keys):
    layer = module(trainable=True, **options)
    inputs = [torch.randn(2, 4, 12, dtype=WIDE)] + ([torch.randn(2, keys, 12, dtype=WIDE)] if keys else [])
    masks = {"causal": causal, "key_lengths": torch.tensor([2, 0]) if padded else None}
    result = outputs_and_gradients(lambda *args: layer(*args, **masks), layer, inputs)
    expected = outputs_and_gradients(lambda *args: by_hand(layer, *args, **masks), layer, inputs)
    for actual, wanted in zip(result, expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"per": "head", "num_kv_heads": 2}, {"rope": True}])
@pytest.mark.parametrize("cross", [False, True])
def test_folded_and_unfolded_agree_forward_and_every_gradient(options, cross):
    folded = module(trainable=True, fold=True, **options)
    unfolded = copy.deepcopy(folded)
    unfolded.fold = False
    x = torch.randn(2, 6, 12, dtype=WIDE)
    context = torch.randn(2, 4, 12, dtype=WIDE) if cross else None
    inputs = [x] + ([context] if cross else [])
    for a, b in zip(*(outputs_and_gradients(layer, layer, inputs) for layer in (folded, unfolded)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_a_trained_s_keeps_its_zeros():
    layer = module(trainable=True)
    before = layer.projection.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(2, 5, 12, dtype=WIDE)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.projection == 0, before == 0) and not torch.equal(layer.projection, before)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_the_future_leaves_the_past_bit_equal(rope, cross):
    """Query i of 9, over 9 or 11 keys, must not feel keys after its own."""
    layer = module(rope=rope).eval()
    x = torch.randn(1, 9, 12, dtype=WIDE)
    context = torch.randn(1, 11, 12, dtype=WIDE) if cross else x
    changed = context.clone()
    changed[:, -3:] = torch.randn(1, 3, 12, dtype=WIDE) * 100
    one, other = (layer(x if cross else keys, keys if cross else None, causal=True) for keys in (context, changed))
    assert torch.equal(one[:, :6], other[:, :6])
    assert not torch.allclose(one[:, 6], other[:, 6])


def test_padding_is_not_seen_whatever_it_holds():
    layer = module()
    x, context = torch.randn(2, 3, 12, dtype=WIDE), torch.randn(2, 6, 12, dtype=WIDE)
    lengths = torch.tensor([6, 4])
    changed = context.clone()
    changed[1, 4:] = 1e6
    one, other = (layer(x, keys, key_lengths=lengths) for keys in (context, changed))
    assert torch.equal(one, other)
    assert torch.allclose(one[1:], layer(x[1:], context[1:, :4]), rtol=0, atol=1e-12)


def test_a_context_of_its_own_width():
    layer = module(context_dim=7)
    inputs = [torch.randn(2, 4, 12, dtype=WIDE), torch.randn(2, 5, 7, dtype=WIDE)]
    assert torch.allclose(layer(*inputs), by_hand(layer, *inputs), rtol=0, atol=1e-12)


def test_a_state_dict_carries_s_between_modules_of_different_seeds():
    layer, other = module(num_kv_heads=2), module(num_kv_heads=2, seed=9)
    assert sorted(layer.state_dict()) == sorted(
        ["projection", *(f"{name}.{kind}" for name in ("query", "key", "value", "output") for kind in ("weight", "bias"))]
    )
    assert not torch.equal(other.projection, layer.projection)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 12, dtype=WIDE)
    assert torch.equal(nn.Sequential(other)(x), layer(x))


def test_it_can_be_built_on_meta_and_filled_from_a_state_dict():
    layer = module(pattern="conv").float()
    with torch.device("meta"):
        empty = module(pattern="conv").float()
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 12)
    assert torch.equal(empty(x), layer(x))


def test_lower_precision_and_autocast_stay_near_float64():
    layer = module()
    x = torch.randn(2, 6, 12, dtype=WIDE)
    exact = layer(x, causal=True)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        low = copy.deepcopy(layer).to(dtype)(x.to(dtype), causal=True)
        assert low.dtype == dtype
        assert torch.allclose(low.double(), exact, rtol=0, atol=tolerance)
    for fold in (True, False):
        single = copy.deepcopy(layer).float()
        single.fold = fold
        with torch.autocast("cpu", torch.bfloat16):
            low = single(x.float(), causal=True)
        assert low.dtype == torch.bfloat16
        assert torch.allclose(low.double(), exact, rtol=0, atol=0.03)


def test_repr_tells_the_pattern_the_density_and_the_widths():
    text = repr(SparseProjectionAttention(64, 2, 16, num_kv_heads=1, value_dim=8, sparsity=0.75))
    for fact in ("d_k=32", "d_k′=16", "d_v=8", "pattern=random", "density=0.250", "num_kv_heads=1", "scale=0.25"):
        assert fact in text


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((10, 4, 2), {}, ["embed_dim = 10", "num_heads = 4", "head_dim"]),
        ((12, 0, 2), {}, ["num_heads", "positive"]),
        ((12, 4, 2), {"num_kv_heads": 3}, ["num_heads = 4", "num_kv_heads = 3"]),
        ((12, 4, 4), {}, ["d_proj = 4", "d_k = 3"]),
        ((12, 4, 3), {"rope": True}, ["rope", "even", "3"]),
        ((12, 4, 2), {"dropout": 1.0}, ["dropout", "[0, 1)", "1.0"]),
        ((12, 4, 2), {"scale": "papr"}, ["scale", "'papr'"]),
        ((12, 4, 2), {"per": "heads"}, ["per", "did you mean 'head'"]),
        ((12, 4, 2), {"pattern": "bands"}, ["'bands'", "did you mean 'banded'"]),
        ((12, 4, 2), {"drop_out": 0.1}, ["'random'", "'drop_out'"]),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(arguments, options, words):
    with pytest.raises(ValueError) as error:
        SparseProjectionAttention(*arguments, **options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_key_lengths_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="key_lengths"):
        module()(torch.randn(2, 4, 12, dtype=WIDE), key_lengths=torch.tensor([3, 2, 1]))


def test_dropout_follows_the_global_seed():
    layer = module(dropout=0.5)
    x = torch.randn(1, 8, 12, dtype=WIDE)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(layer(x))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(layer.eval()(x), layer(x))


def test_without_dropout_no_random_number_is_drawn():
    torch.manual_seed(0)
    layers, x = (module(), module(dropout=0.5).eval()), torch.randn(1, 4, 12, dtype=WIDE)
    before = torch.get_rng_state()
    for layer in layers:
        layer(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_activation_checkpointing_recomputes_the_same_dropout():
    layer = module(dropout=0.5)
    x = torch.randn(2, 8, 12, dtype=WIDE)
    gradients = []
    for forward in (layer, lambda value: checkpoint(layer, value, use_reentrant=False)):
        torch.manual_seed(3)
        own = x.clone().requires_grad_()
        forward(own).square().sum().backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)
