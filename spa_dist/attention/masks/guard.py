"""The guard against collapse: which quantity of S left its range, in words."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from spa_dist.attention.masks.report import MaskReport


@dataclass(frozen=True)
class Fault:
    """One quantity out of its range."""

    quantity: str
    """`density`, `empty columns`, `empty rows`, `rank`, `gate` or `values`."""
    message: str
    repairable: bool = True


@dataclass(frozen=True)
class Guard:
    """Ranges that a healthy S stays in. A column that is all zero narrows attention; a row that is drops a feature of q and k."""

    min_density: float = 0.01
    max_density: float = 1.0
    max_empty_rows: float = 0.25
    """Share of the rows of a head. A random S of 80 % zeros and 8 columns has 17 % of them empty."""
    max_gate: float = 8.0
    """A head's temperature exp(g) stays between 1 / max_gate and max_gate."""

    def faults(self, report: MaskReport, shape: tuple[int, int]) -> Iterator[Fault]:
        """What is wrong with an S of `shape` (d_k, d_k′)."""
        rows, columns = shape
        if not report.finite:
            yield Fault("values", "S is not finite", repairable=False)
            return
        if not self.min_density <= report.density <= self.max_density:
            yield Fault(
                "density",
                f"density {report.density:.4f} is outside [{self.min_density}, {self.max_density}]",
                repairable=report.density < self.min_density,
            )
        if report.empty_columns:
            yield Fault("empty columns", f"{report.empty_columns} of {columns} columns of S are empty")
        if report.empty_rows > self.max_empty_rows * rows:
            share = f"above max_empty_rows={self.max_empty_rows}"
            yield Fault("empty rows", f"{report.empty_rows} of {rows} rows of S are empty, {share}")
        if report.rank < columns and not report.empty_columns:
            yield Fault("rank", f"rank {report.rank} of S is below d_k′ = {columns}")

    def gate_faults(self, gates: Tensor) -> Iterator[Fault]:
        """What is wrong with the heads' temperatures exp(g) [heads]."""
        outside = (gates > self.max_gate) | (gates < 1.0 / self.max_gate) | ~gates.isfinite()
        if bool(outside.any()):
            head = int(outside.nonzero()[0, 0])
            range_ = f"[1/{self.max_gate:g}, {self.max_gate:g}]"
            yield Fault("gate", f"the temperature {float(gates[head]):.3g} of head {head} is outside {range_}")
