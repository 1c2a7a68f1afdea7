"""Tables from made-up results: means, pairs by seed, and what is claimed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spa_dist.comparison.jobs import Job, Results, write_result
from spa_dist.comparison.report import write_report

COSTS = {
    "parameters": 7,
    "folded_parameters": 5,
    "forward_flops_per_token": 2e6,
    "training_flops_per_token": 6e6,
    "cache_numbers_per_token": 48,
    "process_seconds": 60.0,
}


def put(results: Results, variant: str, d_proj: int | None, losses: dict[int, float]) -> None:
    for seed, loss in losses.items():
        job = Job("lm", variant, d_proj, None, seed)
        result: dict[str, Any] = {"final": {"loss": loss, "token_perplexity": float(np.exp(loss))}, **COSTS}
        write_result(results.path(job), job, {"steps": 1}, result)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path)
    put(made, "thin", 16, {0: 4.00, 1: 4.10, 2: 4.20})
    put(made, "random, paper", 16, {0: 4.101, 1: 4.20, 2: 4.302})
    put(made, "random, unbiased", 16, {0: 4.001, 1: 4.10, 2: 4.199})
    put(made, "random + gate, paper", 16, {2: 4.21, 0: 4.01})
    put(made, "dense", None, {0: 3.9, 1: 4.0, 2: 4.1001})
    return made


def test_rows_are_means_over_seeds_and_pairs(results: Results) -> None:
    assert [path.name for path in write_report(results, "lm")] == ["lm.md", "lm.json", "lm.png"]
    table = json.loads((results.folder / "lm.json").read_text())["tables"]
    assert len(table) == 1 and table[0]["d_proj"] == 16
    rows = {row["variant"]: row for row in table[0]["rows"]}
    assert rows["thin"]["mean"] == pytest.approx(4.1) and rows["thin"]["std"] == pytest.approx(0.1)
    hot = rows["random, paper"]["against_thin"]
    assert hot["difference"] == pytest.approx(0.101) and hot["seeds"] == 3 and hot["p_value"] < 0.001
    assert rows["random, unbiased"]["against_thin"]["equivalence_p"] < 0.01
    partial = rows["random + gate, paper"]["against_thin"]
    assert partial["seeds"] == 2 and partial["difference"] == pytest.approx(0.01), "paired by seed, in any order of files"
    contrasts = {(c["first"], c["second"]): c["difference"] for c in table[0]["contrasts"]}
    assert contrasts["random + gate, paper", "random, paper"] == pytest.approx(-0.0915)
    assert contrasts["random + gate, paper", "random, unbiased"] == pytest.approx(0.01)


def test_the_page_says_it(results: Results) -> None:
    write_report(results, "lm")
    lines = (results.folder / "lm.md").read_text().splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("What scale"))]
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in table if line.startswith("| ")}
    values = np.exp([4.0, 4.1, 4.2])
    assert cells["thin"][1] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
    assert " =" not in " ".join(cells["random, paper"]) and cells["random, unbiased"][5].endswith("=")
    assert "dense" in cells, "it bounds every width"


def test_nothing_without_results(tmp_path: Path) -> None:
    assert write_report(Results(tmp_path), "recall") == [] and list(tmp_path.iterdir()) == []


def test_recall_says_when_it_was_solved(tmp_path: Path) -> None:
    """The mean over the seeds that solved it, and how many did; what truncation leaves of dense attention."""
    made = Results(tmp_path)
    cut = {"truncated_accuracy": {"8": 0.75}}
    for seed, step in enumerate((100, None, 140)):
        for variant, width, more in (("thin", 8, {}), ("dense", None, cut)):
            job = Job("recall", variant, width, 48, seed)
            final = {"accuracy": 0.5 + seed / 100, "solved_at": step, **more}
            write_result(made.path(job), job, {"steps": 1}, {"final": final, **COSTS})
    write_report(made, "recall")
    page = (tmp_path / "recall.md").read_text()
    assert "## d_k′ = 8, 48 pairs" in page and "| thin | 0.5100 ± 0.0100 | 120 (2/3) | 3 |" in page
    assert "truncated to rank 8: dense: 0.7500 ± 0.0000." in page
