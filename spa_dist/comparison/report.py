"""Tables and figure of a comparison: `<task>.md`, `<task>.json` and `<task>.png` in its folder, rewritten after each run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spa_dist.comparison.figure import draw
from spa_dist.comparison.jobs import Results
from spa_dist.comparison.statistics import PairedComparison, deviation, mean
from spa_dist.comparison.summary import Row, as_json, compared, contrasts_of, control_of, groups_of, rows_of
from spa_dist.comparison.tasks import MEASURES, Measure

TITLES = {"lm": "Language modelling", "recall": "Multi-query associative recall"}


def write_report(results: Results, task: str) -> list[Path]:
    """Write what the finished runs of a task say; returns the files. Nothing without a finished run at some d_k′."""
    rows, measure = rows_of(results.read(task)), MEASURES[task]
    if not groups_of(rows):
        return []
    texts = {
        f"{task}.md": markdown(task, rows, measure),
        f"{task}.json": json.dumps(as_json(rows, measure), indent=1, ensure_ascii=False) + "\n",
    }
    files = [results.folder / name for name in texts]
    for path, text in zip(files, texts.values()):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    files.append(results.folder / f"{task}.png")
    draw(groups_of(rows), task, files[-1])
    return files


def markdown(task: str, rows: Sequence[Row], measure: Measure) -> str:
    """The whole report."""
    parts = [f"# {TITLES[task]}: kinds of attention compared", _introduction(task, rows, measure)]
    for pairs, width, group in groups_of(rows):
        parts.append(f"## d_k′ = {width}" + (f", {pairs} pairs" if pairs else ""))
        parts.append(_table(task, group, measure))
        parts += _truncations(group, width)
        contrasts = contrasts_of(group, measure)
        if contrasts:
            parts += [f"What scale and gate do ({measure.name}, first − second):", _contrast_table(contrasts)]
    return "\n\n".join(parts) + "\n"


def _introduction(task: str, rows: Sequence[Row], measure: Measure) -> str:
    runs = sum(len(row.results) for row in rows)
    seconds = sum(result["process_seconds"] for row in rows for result in row.results.values())
    settings = rows[0].fact("settings")
    lines = [
        f"Made by `tools/compare_attention.py --task {task}` from {runs} runs in `raw/` ({seconds / 3600:.1f} core hours). Settings: "
        f"`{json.dumps(settings, ensure_ascii=False)}`.",
        f"Mean ± standard deviation over seeds. Δ is the difference from thin at the same seeds in {measure.name}; p is that of a paired "
        f"t-test of no difference; TOST p that of the equivalence test with a margin of {measure.margin} {measure.unit}: only where it "
        "is below 0.05 (marked =) is there evidence of no difference. With three seeds both tests are weak, and none is corrected "
        "for the number of rows.",
    ]
    return "\n\n".join(lines)


def _table(task: str, group: Sequence[Row], measure: Measure) -> str:
    middle = ["perplexity"] if task == "lm" else ["accuracy", "solved at step (seeds)"]
    titles = [
        *("attention", *middle, "seeds", "Δ from thin", "p", "TOST p"),
        *("density", "gate exp(g)", "parameters", "folded", "MFLOP/token", "cache/token"),
    ]
    control = control_of(group)
    body = []
    for row in group:
        comparison = compared(row, control, measure) if control is not None and row is not control else None
        cells = [row.variant, *_outcomes(task, row), str(len(row.results)), *_comparison(comparison)]
        body.append([*cells, _mean_of(row, "mask_density"), _mean_of(row, "mask_gates"), *_costs(row)])
    return _lines(titles, body)


def _truncations(group: Sequence[Row], width: int) -> list[str]:
    """What is left of a trained dense model whose W_Qᵀ W_K is truncated to rank d_k′."""
    found = [
        f"{row.variant}: {spread([cut[str(width)] for cut in row.values('truncated_accuracy')], 4)}"
        for row in group
        if row.d_proj is None and "truncated_accuracy" in next(iter(row.results.values()))["final"]
    ]
    return [f"Accuracy after the trained W_Qᵀ W_K is truncated to rank {width}: {'; '.join(found)}."] if found else []


def _outcomes(task: str, row: Row) -> list[str]:
    if task == "lm":
        return [spread([math.exp(loss) for loss in row.values("loss")], 2)]
    solved = [step for step in row.values("solved_at") if step is not None]
    steps = f"{mean(solved):.0f} " if solved else ""
    return [spread(row.values("accuracy"), 4), f"{steps}({len(solved)}/{len(row.results)})"]


def spread(values: Sequence[float], digits: int) -> str:
    """mean ± std."""
    std = deviation(values)
    return f"{mean(values):.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def _comparison(comparison: PairedComparison | None) -> list[str]:
    if comparison is None:
        return ["", "", ""]
    if comparison.p_value is None or comparison.equivalence_p is None:
        return [f"{comparison.difference:+.4f}", "", ""]
    mark = " =" if comparison.equivalent else ""
    return [f"{comparison.difference:+.4f}", f"{comparison.p_value:.3f}", f"{comparison.equivalence_p:.3f}{mark}"]


def _mean_of(row: Row, key: str) -> str:
    found = [result["final"][key] for result in row.results.values() if key in result["final"]]
    numbers = [number for value in found for number in _flat(value)]
    return f"{mean(numbers):.2f}" if numbers else ""


def _flat(value: Any) -> list[float]:
    return [number for part in value for number in _flat(part)] if isinstance(value, list) else [value]


def _costs(row: Row) -> list[str]:
    parameters, folded = row.fact("parameters"), row.fact("folded_parameters")
    flops = row.fact("forward_flops_per_token") / 1e6
    return [f"{parameters:,}", f"{folded:,}", f"{flops:.3f}", str(row.fact("cache_numbers_per_token"))]


def _contrast_table(contrasts: Sequence[tuple[str, str, PairedComparison]]) -> str:
    rows = [[first, second, str(found.seeds), *_comparison(found)] for first, second, found in contrasts]
    return _lines(["first", "second", "seeds", "difference", "p", "TOST p"], rows)


def _lines(titles: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *body))
