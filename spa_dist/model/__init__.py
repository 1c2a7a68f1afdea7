"""Tensor-parallel Transformers whose attention is chosen by `attention.kind`."""

from spa_dist.model.build import build_model
from spa_dist.model.decoder import Decoder

__all__ = ["Decoder", "build_model"]
