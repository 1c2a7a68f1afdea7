"""Pruning and regrowth against sorting, entry by entry."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spa_dist.attention.masks import largest, number_kept, pruned


def brute_force(weight: list[float], on: list[bool], gradient: list[float] | None, kept: int, grow: int) -> tuple[set, set]:
    """(new mask, survivors) as sets of indices; ties go to the lower index."""
    grow = grow if gradient is not None else 0
    survivors = set(sorted((i for i, m in enumerate(on) if m), key=lambda i: (-abs(weight[i]), i))[: max(0, kept - grow)])
    if gradient is None:
        return survivors, survivors
    rest = sorted((i for i in range(len(on)) if i not in survivors), key=lambda i: (-abs(gradient[i]), i))
    return survivors | set(rest[: kept - len(survivors)]), survivors


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_updates_are_exact_to_the_entry(data: st.DataObject) -> None:
    """Few distinct values, so that ties are common; heads are decided each by itself."""
    heads, rows, columns = (data.draw(st.integers(1, n)) for n in (3, 6, 5))
    size = rows * columns
    values = st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=size, max_size=size)
    weight, gradient = ([data.draw(values) for _ in range(heads)] for _ in range(2))
    mask = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(heads)]
    kept = data.draw(st.integers(1, size))
    grow = data.draw(st.integers(0, kept))
    with_gradient = data.draw(st.booleans())

    def tensor(lists: list) -> torch.Tensor:
        return torch.tensor(lists).view(heads, rows, columns)

    new, survivors = pruned(
        tensor(weight), tensor(mask), tensor(gradient) if with_gradient else None, kept=kept, regrown=grow
    )
    for head in range(heads):
        expected = brute_force(weight[head], mask[head], gradient[head] if with_gradient else None, kept, grow)
        for found, wanted in zip((new, survivors), expected):
            assert set(found[head].flatten().nonzero().flatten().tolist()) == wanted
        if with_gradient:
            assert int(new[head].sum()) == kept


def test_number_kept_is_the_nearest_integer() -> None:
    assert [number_kept(s, 1024) for s in (0.0, 0.8, 0.95, 0.9995, 0.99999)] == [1024, 205, 51, 1, 1]
    assert number_kept(0.5, 5) == 3 and number_kept(0.7, 10) == 3


def test_largest_takes_what_there_is() -> None:
    values, candidates = torch.tensor([5.0, 4.0, 3.0]), torch.tensor([False, True, True])
    assert largest(values, candidates, 7).tolist() == [False, True, True]
    assert largest(values, candidates, 0).tolist() == [False] * 3
