"""What a learned S has become: density, ranks, empty rows and columns."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskReport:
    """Facts about S over all its heads: the worst head for the ranks and empty rows and columns, the mean for density."""

    density: float
    """Share of non-zeros."""
    rank: int
    effective_rank: float
    """exp of the entropy of the singular values (Roy and Vetterli, 2007): d_k′ where all are equal, 1 where one is left."""
    empty_rows: int
    empty_columns: int
    finite: bool


def effective_rank(singular_values: Tensor) -> Tensor:
    """exp(−Σ p log p) with p = σ/Σσ, over the last dimension; 0 where all are zero."""
    total = singular_values.sum(-1, keepdim=True)
    p = singular_values / total.clamp_min(torch.finfo(singular_values.dtype).tiny)
    return torch.where(total.squeeze(-1) > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def mask_report(projection: Tensor, support: Tensor | None = None) -> MaskReport:
    """Measure S [heads, d_k, d_k′]; one batched SVD in float64 on the CPU.

    support (bool) says which entries are on where that is more than the non-zeros: an entry that has just regrown is still
    zero. The ranks take such an entry to have the typical size.
    """
    values = projection.detach().to("cpu", torch.float64)
    support = values != 0 if support is None else support.cpu()
    finite = bool(values.isfinite().all())
    if finite and bool(support.any()):
        live = values[support & (values != 0)]
        size = live.square().mean().sqrt() if live.numel() else 1.0
        values = torch.where(support & (values == 0), size, values)
    singular = torch.linalg.svdvals(values) if finite else torch.zeros(values.shape[0], 1, dtype=torch.float64)
    tolerance = singular[..., :1] * max(values.shape[-2:]) * torch.finfo(torch.float32).eps
    return MaskReport(
        density=float(support.double().mean()),
        rank=int((singular > tolerance).sum(-1).min()),
        effective_rank=float(effective_rank(singular).min()),
        empty_rows=int((~support.any(-1)).sum(-1).max()),
        empty_columns=int((~support.any(-2)).sum(-1).max()),
        finite=finite,
    )
