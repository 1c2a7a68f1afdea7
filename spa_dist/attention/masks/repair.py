"""The smallest change to a support that makes S sound again."""

import math

import torch
from torch import Tensor

from spa_dist.attention.masks.guard import Guard
from spa_dist.attention.masks.pruning import largest


def repaired_support(projection: Tensor, weight: Tensor, guard: Guard) -> Tensor:
    """Entries to switch on so that one head's S is sound again: no empty column, no more empty rows than it may have, full
    rank, the least density.

    projection S and weight W [d_k, d_k′]; W tells which switched-off entries were large. Returns a bool mask of additions.
    Where W tells nothing, an entry goes to the row, or column, that has the fewest.
    """
    support = projection != 0
    added = torch.zeros_like(support)

    def add(row: int, column: int) -> None:
        support[row, column] = added[row, column] = True

    for column in (~support.any(0)).nonzero().flatten().tolist():
        add(_best(weight[:, column], support[:, column], support.sum(1)), column)
    empty = (~support.any(1)).nonzero().flatten().tolist()
    for row in empty[: max(0, len(empty) - int(guard.max_empty_rows * support.shape[0]))]:
        add(row, _best(weight[row], support[row], support.sum(0)))
    missing = max(0, math.ceil(guard.min_density * support.numel()) - int(support.sum()))
    for flat in largest(weight.abs(), ~support, missing).flatten().nonzero().flatten().tolist():
        add(*divmod(flat, support.shape[1]))
    for _ in range(support.shape[1]):
        place = _independence(torch.where(added, revived_values(projection, weight, added), projection), support)
        if place is None:
            break
        add(*place)
    return added


def revived_values(projection: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    """W with a value for each added entry: what it was, or the root mean square of S's non-zeros where it was zero."""
    live = projection[projection != 0]
    size = float(live.square().mean().sqrt()) if live.numel() else (1.0 / projection.shape[1]) ** 0.5
    return torch.where(added & (weight == 0), torch.full_like(weight, size), weight)


def dropped_for(weight: Tensor, support: Tensor, added: Tensor) -> Tensor:
    """As many entries to switch off as were added, the smallest that S can spare. Bool [d_k, d_k′].

    weight W with a value for each added entry. An entry can be spared when its row and column keep another one, and S its rank.
    """
    values = torch.where(support | added, weight, 0.0).double()
    dropped = torch.zeros_like(added)
    old = support & ~added
    order = torch.sort(torch.where(old, weight.abs(), torch.inf).flatten(), stable=True).indices[: int(old.sum())]
    rank, wanted = int(torch.linalg.matrix_rank(values)), int(added.sum())
    for row, column in (divmod(int(flat), added.shape[1]) for flat in order):
        if int(dropped.sum()) == wanted:
            break
        rest = values.clone()
        rest[row, column] = 0.0
        spared = bool(rest[row].any()) and bool(rest[:, column].any())
        if spared and int(torch.linalg.matrix_rank(rest)) == rank:
            values, dropped[row, column] = rest, True
    return dropped


def _best(values: Tensor, taken: Tensor, crowd: Tensor) -> int:
    """Of one row or column: the free place with the largest value, and among equals in the emptiest line."""
    size = values.abs().double()
    score = size - (crowd.double() + 1) * (1e-9 * size.max() + 1e-30)
    return int(torch.where(taken, -torch.inf, score).argmax())


def _independence(projection: Tensor, support: Tensor) -> tuple[int, int] | None:
    """Where to add an entry so that a column that lies in the span of those before it leaves it; None where none does.

    Gram–Schmidt in float64. The row is the free one whose unit vector is farthest from the span of the independent columns.
    """
    basis = torch.zeros(projection.shape[0], 0, dtype=torch.float64)
    dependent: list[int] = []
    for index, column in enumerate(projection.double().cpu().unbind(1)):
        rest = column - basis @ (basis.T @ column)
        rest = rest - basis @ (basis.T @ rest)
        if float(rest.norm()) <= 1e-6 * float(column.norm()):
            dependent.append(index)
        else:
            basis = torch.cat([basis, (rest / rest.norm()).unsqueeze(1)], dim=1)
    distance = 1.0 - basis.square().sum(1)
    for place in dependent:
        free = ~support[:, place].cpu()
        if bool(free.any()):
            return int(torch.where(free, distance, -torch.inf).argmax()), place
    return None
