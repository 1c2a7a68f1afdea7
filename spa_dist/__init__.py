"""Distributed training of Transformers with Sparse Projection Attention (SPA)."""

__version__ = "0.1.0"
