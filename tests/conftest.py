"""Settings for every test: what passed once passes again, and Triton's kernels run where there is no GPU."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton's interpreter must be asked for before anything imports the kernels.
    os.environ["TRITON_INTERPRET"] = "1"

# `make test` draws the same examples each time; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw from torch's generator draw the same numbers each time."""
    torch.manual_seed(0)
