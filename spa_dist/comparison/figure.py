"""The figure of a comparison: a point with its spread for every variant, one colour for each d_k′."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spa_dist.comparison.statistics import deviation, mean
from spa_dist.comparison.summary import Row
from spa_dist.comparison.variants import VARIANTS

Groups = Sequence[tuple[int | None, int, list[Row]]]


LM_PANELS = (("perplexity per token", lambda row: [math.exp(loss) for loss in row.values("loss")]),)
RECALL_PANELS = (
    ("accuracy", lambda row: row.values("accuracy")),
    ("steps until solved", lambda row: [step for step in row.values("solved_at") if step is not None]),
)


def draw(groups: Groups, task: str, path: Path) -> None:
    """Write a PNG: a column of panels for each number of pairs, a row for each measure. What was never solved has no point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = sorted({pairs or 0 for pairs, _, _ in groups})
    measures = LM_PANELS if task == "lm" else RECALL_PANELS
    names = [v.name for v in VARIANTS if any(row.variant == v.name for _, _, group in groups for row in group)]
    size = (3.2 + 3.4 * len(columns), (1.2 + 0.26 * len(names)) * len(measures))
    figure, axes = pyplot.subplots(
        len(measures), len(columns), figsize=size, sharey=True, sharex="row", layout="constrained", squeeze=False
    )
    for line, (title, values) in zip(axes, measures):
        for axis, pairs in zip(line, columns):
            _panel(axis, [group for group in groups if (group[0] or 0) == pairs], names, values)
            axis.set(xlabel=title, title=f"{pairs} pairs" if pairs else "")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    max(axes[0], key=lambda axis: len(axis.get_legend_handles_labels()[0])).legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)
    pyplot.close(figure)


def _panel(axis: Any, groups: Groups, names: Sequence[str], values_of: Callable[[Row], list[float]]) -> None:
    for index, (_, width, rows) in enumerate(groups):
        offset = 0.18 * (index - (len(groups) - 1) / 2)
        points = [(names.index(row.variant) + offset, values_of(row)) for row in rows]
        points = [(place, values) for place, values in points if values]
        axis.errorbar(
            [mean(values) for _, values in points],
            [place for place, _ in points],
            xerr=[deviation(values) or 0.0 for _, values in points],
            fmt="o",
            markersize=4,
            capsize=2,
            color=f"C{WIDTH_COLOURS.get(width, 9)}",
            label=f"d_k′ = {width}",
        )
    axis.grid(alpha=0.3)


WIDTH_COLOURS = {32: 2, 16: 0, 8: 1}
