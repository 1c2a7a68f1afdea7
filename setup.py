"""Packaging: the attention library alone, and extras: `train` to train, `hf` transformers, `sweep` Ray on top, `dev` for the tests."""

from pathlib import Path

from setuptools import find_packages, setup

TRAIN = [
    "deepspeed>=0.19",
    "megatron-core>=0.16,<0.17; python_version < '3.12'",
    "megatron-core>=0.16,<0.20; python_version >= '3.12'",
    "matplotlib>=3.8",
    "safetensors>=0.4",
    "sentencepiece>=0.2",
    "tensorboard>=2.15",
    "tqdm>=4.65",
    "triton>=3.0; platform_system == 'Linux'",
    "webdataset>=1.0",
]
HF = ["transformers>=5.24,<6", "safetensors>=0.4"]
SWEEP = ["optuna>=4", "psutil>=5", "ray[train,tune]>=2.51", "rich>=13"]
DEV = ["hypothesis>=6", "mypy>=1.10", "pytest>=8", "ruff>=0.6", "psutil>=5"]

setup(
    name="spa_dist",
    version="0.1.0",
    description="Distributed training of Transformers with Sparse Projection Attention",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["spa_dist", "spa_dist.*", "data_pipeline", "data_pipeline.*"]),
    python_requires=">=3.10",
    install_requires=["torch>=2.5", "numpy>=1.26", "pydantic>=2.6"],
    extras_require={"train": TRAIN, "hf": HF, "sweep": TRAIN + SWEEP, "dev": TRAIN + HF + SWEEP + DEV},
)
