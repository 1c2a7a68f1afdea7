"""The runs of a table: which there are, in which order, and their files."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spa_dist.comparison.variants import VARIANTS, Variant
from spa_dist.errors import DataError


@dataclass(frozen=True)
class Job:
    """One run: a variant at one d_k′, one size of the task, one seed."""

    task: str
    """`lm` or `recall`."""
    variant: str
    d_proj: int | None
    """d_k′; None for dense attention."""
    pairs: int | None
    """Pairs of a recall sequence; None for language modelling."""
    seed: int

    @property
    def name(self) -> str:
        """Stem of its file."""
        words = re.sub(r"[^0-9a-zλ]+", "-", self.variant.lower().replace("+", "and")).strip("-").replace("λ", "lambda")
        width = "" if self.d_proj is None else f"_d{self.d_proj}"
        pairs = "" if self.pairs is None else f"_p{self.pairs}"
        return f"{self.task}_{words}{width}{pairs}_s{self.seed}"

    @property
    def title(self) -> str:
        """For people."""
        width = "" if self.d_proj is None else f", d_k′ = {self.d_proj}"
        pairs = "" if self.pairs is None else f", {self.pairs} pairs"
        return f"{self.variant}{width}{pairs}, seed {self.seed}"

    def definition(self) -> Variant:
        """The variant by its name."""
        return next(variant for variant in VARIANTS if variant.name == self.variant)


class Results:
    """The finished runs of a folder: `<folder>/raw/<job>.json`, each written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder, self.raw = folder, folder / "raw"

    def path(self, job: Job) -> Path:
        """Where the result of a job is."""
        return self.raw / f"{job.name}.json"

    def has(self, job: Job, settings: dict[str, Any]) -> bool:
        """Whether a job is finished.

        Raises:
            DataError: its file was made with other settings, or cannot be read.
        """
        path = self.path(job)
        if not path.exists():
            return False
        made_with = read_result(path).get("settings")
        if made_with != json.loads(json.dumps(settings)):
            raise DataError(f"{path} was made with other settings: remove it, or write to another --output")
        return True

    def read(self, task: str) -> list[dict[str, Any]]:
        """The results of a task, in the order of their names."""
        return [read_result(path) for path in sorted(self.raw.glob(f"{task}_*.json"))]


def read_result(path: Path) -> dict[str, Any]:
    """One result file.

    Raises:
        DataError: it is not a result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a result of a run: {error}; remove it") from None
    if not isinstance(result, dict) or "job" not in result:
        raise DataError(f"{path} is not a result of a run; remove it")
    return result


def write_result(path: Path, job: Job, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result of a job under a temporary name, then rename it: a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"job": asdict(job), "settings": settings, **result}, indent=1, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def in_order(task: str, cells: list[tuple[Variant, int | None, int | None]], seeds: int) -> Iterator[Job]:
    """Seed 0 of every cell (variant, d_k′, pairs) first, then seed 1, …: a table that is stopped early is balanced. Then the ablations."""
    for ablation in (False, True):
        for seed in range(seeds):
            for variant, d_proj, pairs in cells:
                if variant.ablation == ablation:
                    yield Job(task, variant.name, d_proj if variant.has_width else None, pairs, seed)


def cells_of(
    variants: list[Variant], widths: tuple[int, ...], pairs: tuple[int | None, ...]
) -> list[tuple[Variant, int | None, int | None]]:
    """Every variant at every width and number of pairs; dense attention once for each number of pairs."""
    cells: list[tuple[Variant, int | None, int | None]] = []
    for count in pairs:
        cells += [(variant, None, count) for variant in variants if not variant.has_width]
        cells += [(variant, width, count) for width in widths for variant in variants if variant.has_width]
    return cells
