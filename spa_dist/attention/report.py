"""What a projection turned out to be: the facts to print, log and check beside what was asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ProjectionReport:
    """Facts about S, over all its heads: `rank` is the smallest of any head, the counts are totals.

    `repaired`: non-zeros moved to fill empty rows and columns when S was drawn; None for a tensor that did not come
    straight from `make_projection`.
    """

    density: float
    nonzeros: int
    rank: int
    empty_rows: int
    empty_columns: int
    repaired: int | None


def projection_report(projection: Tensor) -> ProjectionReport:
    """Measure S [heads, d_k, d_k′] (or one head's [d_k, d_k′]): density, rank, empty rows and columns, repairs."""
    values = projection.detach().to(device="cpu", dtype=torch.float64)
    support = values != 0
    nonzeros = int(support.sum())
    return ProjectionReport(
        density=nonzeros / support.numel(),
        nonzeros=nonzeros,
        rank=int(torch.linalg.matrix_rank(values).min()),
        empty_rows=int((~support.any(dim=-1)).sum()),
        empty_columns=int((~support.any(dim=-2)).sum()),
        repaired=getattr(projection, "repaired", None),
    )
