from pathlib import Path

import pytest

from tests.synthetic import write_dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with 8 canonical streams of several shards each; tests must not change it."""
    return write_dataset(tmp_path_factory.mktemp("pipeline") / "dataset")
