"""Readers that share no code with the pipeline: plain tarfile, json and slices."""

import itertools
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np


def read_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def read_tar(path: Path, dtype: str = "<u2") -> list[tuple[str, dict[str, Any], list[int]]]:
    """(key, metadata, token ids with EOS) of each document, from the raw members."""
    documents = []
    with tarfile.open(path, "r:") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    for key in dict.fromkeys(name.split(".")[0] for name in members):
        ids = np.frombuffer(members.pop(f"{key}.tokens"), dtype).tolist()
        documents.append((key, json.loads(members.pop(f"{key}.json")), ids))
    assert not members, f"members of no document: {sorted(members)}"
    return documents


def windows_of(folder: Path, split: str, length: int) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Shard file -> its windows (inputs, targets), token by token."""
    index = read_json(folder)
    eos = index["tokenizer"]["eos_id"]
    windows = {}
    for shard in index["splits"][split]["shards"]:
        sequence = [eos]
        for _, _, ids in read_tar(folder / shard["file"]):
            sequence += ids
        pairs = list(itertools.pairwise(sequence))
        rows = []
        for start in range(0, len(pairs), length):
            row = pairs[start : start + length]
            row += [(eos, -100)] * (length - len(row))
            rows.append((tuple(i for i, _ in row), tuple(t for _, t in row)))
        windows[shard["file"]] = rows
    return windows


def rows_of(batch: tuple[np.ndarray, np.ndarray]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    inputs, targets = batch
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape
    return [(tuple(i), tuple(t)) for i, t in zip(inputs.tolist(), targets.tolist())]


def count_rows(windows: dict[str, list[Any]]) -> Counter[Any]:
    return Counter(row for rows in windows.values() for row in rows)
