"""A folder that appears complete or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.index import FORMAT, INDEX_FILE
from spa_dist.errors import DataError


def is_dataset(folder: Path) -> bool:
    """Whether `folder` holds what prepare.py wrote, whatever its state: only that may be replaced."""
    try:
        return json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return (folder / INDEX_FILE).exists() and any(folder.glob("*.tar"))


@contextmanager
def complete_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Give a sibling folder to write into, and rename it to `target` when the block ends well; else remove it.

    An existing dataset at `target` gives way only with `replace`, anything else but an empty folder never. What a killed run
    left behind is removed by the next. Raises DataError, also when another process is at work on the same target.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not is_dataset(target):
            raise DataError(f"{target}: exists and is not a dataset of ours: choose another --output")
        if not replace:
            raise DataError(f"{target}: holds a dataset made with other input or options: pass --force, or another --output")
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                yield partial
                _swap(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error}): choose another --output") from None


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    path = target.with_name(f".{target.name}.lock")
    lock = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise DataError(f"{target}: another prepare.py is writing it: wait for it, or choose another --output") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _swap(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
