"""The figure of a comparison: a point with its spread for every variant, one colour for each d_k′."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spa_dist.comparison.statistics import deviation, mean
from spa_dist.comparison.summary import Row
from spa_dist.comparison.variants import VARIANTS

Groups = Sequence[tuple[int | None, int, list[Row]]]


def draw(groups: Groups, task: str, path: Path) -> None:
    """Write a PNG: one panel for each number of pairs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({pairs or 0 for pairs, _, _ in groups})
    names = [v.name for v in VARIANTS if any(row.variant == v.name for _, _, group in groups for row in group)]
    size = (3.2 + 3.4 * len(panels), 1.6 + 0.26 * len(names))
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axis, pairs in zip(axes[0], panels):
        _panel(axis, [group for group in groups if (group[0] or 0) == pairs], names, task)
        axis.set_title(f"{pairs} pairs" if pairs else "validation perplexity, PG-19")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    pyplot.close(figure)


def _panel(axis: Any, groups: Groups, names: Sequence[str], task: str) -> None:
    for index, (_, width, rows) in enumerate(groups):
        offset = 0.18 * (index - (len(groups) - 1) / 2)
        values = [[math.exp(v) for v in row.values("loss")] if task == "lm" else row.values("accuracy") for row in rows]
        axis.errorbar(
            [mean(v) for v in values],
            [names.index(row.variant) + offset for row in rows],
            xerr=[deviation(v) or 0.0 for v in values],
            fmt="o",
            markersize=4,
            capsize=2,
            label=f"d_k′ = {width}",
        )
    axis.grid(alpha=0.3)
    axis.set_xlabel("perplexity per token" if task == "lm" else "accuracy")
