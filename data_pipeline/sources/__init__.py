"""Corpora: `open_source` names them, and each yields its documents lazily."""

from collections.abc import Callable

from data_pipeline.sources.base import Document, Source
from data_pipeline.sources.jsonl import ArxivSource
from data_pipeline.sources.pg19 import Pg19Source
from data_pipeline.sources.python_code import PythonSource
from data_pipeline.sources.text import TextSource
from spa_dist.errors import DataError

SOURCES: dict[str, Callable[..., Source]] = {
    "python": PythonSource,
    "text": TextSource,
    "pg19": Pg19Source,
    "arxiv": ArxivSource,
}

__all__ = ["SOURCES", "Document", "Source", "open_source"]


def open_source(name: str, path: str | None) -> Source:
    """The source `name` over `path` (none for python). Raises DataError when the path is missing or not of that kind."""
    if name == "python":
        if path is not None:
            raise DataError(
                "--source python reads the running interpreter's packages: leave --input out, or use --source text"
            )
        return PythonSource()
    if path is None:
        raise DataError(f"--source {name} needs --input PATH")
    return SOURCES[name](path)
