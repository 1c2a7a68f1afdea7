"""From raw results to the rows and contrasts of a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spa_dist.comparison.statistics import PairedComparison, compare_paired, deviation, mean
from spa_dist.comparison.tasks import Measure
from spa_dist.comparison.variants import CONTROL, VARIANTS

_GATES = [(f"{kind} + gate", kind) for kind in ("dense", "thin")]
_SCALES = [(f"random + gate, {scale}", f"random, {scale}") for scale in ("paper", "unbiased")]
_ADAPTIVE = [
    pair
    for method in ("magnitude", "gumbel")
    for pair in (
        (f"adaptive {method}, paper", f"learned {method}, paper"),
        (f"adaptive {method}, unbiased", f"learned {method}, unbiased"),
        (f"learned {method}, unbiased", f"learned {method}, paper"),
        (f"adaptive {method}, paper", f"learned {method}, unbiased"),
    )
]
_RATES = [
    *((f"random, lr ×1, {scale}", f"random, {scale}") for scale in ("paper", "unbiased")),
    ("random, lr ×1, unbiased", "random, lr ×1, paper"),
    *((f"random + gate, lr ×1, {scale}", f"random, lr ×1, {scale}") for scale in ("paper", "unbiased")),
    ("random + gate, lr ×1, paper", "random, lr ×1, unbiased"),
]
CONTRASTS: tuple[tuple[str, str], ...] = (
    *_GATES,
    *_SCALES,
    ("random, unbiased", "random, paper"),
    ("random + gate, paper", "random, unbiased"),
    *_ADAPTIVE,
    *_RATES,
)
"""Pairs whose differences say whether the adaptive gate does more than mend the scale 1/√d_k′. If that is all it does, its gain at the
paper's scale is that of the unbiased scale, and at the unbiased scale, on thin and on dense attention it gains nothing."""


@dataclass
class Row:
    """One variant at one d_k′ and number of pairs, over its seeds."""

    variant: str
    d_proj: int | None
    pairs: int | None
    results: dict[int, dict[str, Any]]
    """By seed."""

    def values(self, key: str) -> list[Any]:
        """An entry of `final`, in the order of seeds."""
        return [self.results[seed]["final"][key] for seed in sorted(self.results)]

    def fact(self, key: str) -> Any:
        """What is the same for all seeds."""
        return next(iter(self.results.values()))[key]


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """Results grouped into rows: by pairs, wide before narrow, in the order of the variants."""
    rows: dict[tuple, Row] = {}
    for result in results:
        job = result["job"]
        key = (job["variant"], job["d_proj"], job["pairs"])
        rows.setdefault(key, Row(*key, {})).results[job["seed"]] = result
    order = {variant.name: index for index, variant in enumerate(VARIANTS)}
    return sorted(rows.values(), key=lambda row: (row.pairs or 0, -(row.d_proj or 10**9), order[row.variant]))


def groups_of(rows: Sequence[Row]) -> list[tuple[int | None, int, list[Row]]]:
    """(pairs, d_k′, its rows): one table each; dense attention, which has no d_k′, stands in every table of its pairs."""
    keys = sorted({(row.pairs or 0, -row.d_proj) for row in rows if row.d_proj is not None})
    order = {variant.name: index for index, variant in enumerate(VARIANTS)}
    groups = []
    for pairs, width in keys:
        chosen = [row for row in rows if (row.pairs or 0) == pairs and row.d_proj in (None, -width)]
        groups.append((pairs or None, -width, sorted(chosen, key=lambda row: order[row.variant])))
    return groups


def compared(first: Row, second: Row, measure: Measure) -> PairedComparison | None:
    """first − second over the seeds that both have; None without one."""
    seeds = sorted(first.results.keys() & second.results.keys())
    if not seeds:
        return None
    a, b = ([row.results[seed]["final"][measure.key] for seed in seeds] for row in (first, second))
    return compare_paired(a, b, measure.margin)


def control_of(group: Sequence[Row]) -> Row | None:
    """The row that a group is compared with."""
    return next((row for row in group if row.variant == CONTROL), None)


def contrasts_of(group: Sequence[Row], measure: Measure) -> list[tuple[str, str, PairedComparison]]:
    """Those `CONTRASTS` that the group has both rows of."""
    by_name = {row.variant: row for row in group}
    found = []
    for first, second in CONTRASTS:
        if first in by_name and second in by_name:
            comparison = compared(by_name[first], by_name[second], measure)
            if comparison is not None:
                found.append((first, second, comparison))
    return found


def as_json(rows: Sequence[Row], measure: Measure) -> dict[str, Any]:
    """The tables as data."""
    tables = []
    for pairs, width, group in groups_of(rows):
        control = control_of(group)
        entries = [_row_json(row, control, measure) for row in group]
        contrasts = [{"first": a, "second": b, **asdict(c)} for a, b, c in contrasts_of(group, measure)]
        tables.append({"pairs": pairs, "d_proj": width, "rows": entries, "contrasts": contrasts})
    seconds = sum(result["process_seconds"] for row in rows for result in row.results.values())
    return {"measure": measure.key, "margin": measure.margin, "tables": tables, "process_seconds": seconds}


def _row_json(row: Row, control: Row | None, measure: Measure) -> dict[str, Any]:
    values = row.values(measure.key)
    comparison = compared(row, control, measure) if control is not None and row is not control else None
    facts = (
        "parameters",
        "folded_parameters",
        "forward_flops_per_token",
        "training_flops_per_token",
        "cache_numbers_per_token",
    )
    return {
        "variant": row.variant,
        "d_proj": row.d_proj,
        "seeds": sorted(row.results),
        "values": values,
        "mean": mean(values),
        "std": deviation(values),
        "against_thin": asdict(comparison) if comparison else None,
        "solved_at": row.values("solved_at") if measure.key == "accuracy" else None,
        **{key: row.fact(key) for key in facts},
    }
