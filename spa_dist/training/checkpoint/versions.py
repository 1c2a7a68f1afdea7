"""Versions of the packages that decide what a run computes."""

import platform
from importlib import metadata

import spa_dist

PACKAGES = ("torch", "deepspeed", "megatron-core", "triton", "numpy", "sentencepiece", "webdataset", "safetensors")


def installed_versions() -> dict[str, str]:
    """Name → version of each package that is installed, of Python, and of spa_dist itself."""
    versions = {"python": platform.python_version(), "spa_dist": spa_dist.__version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
