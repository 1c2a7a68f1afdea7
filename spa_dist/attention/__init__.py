"""Sparse Projection Attention on torch alone: the projections S, how they are applied, and the attention module."""

from spa_dist.attention.folding import fold_projection, on_support, project
from spa_dist.attention.gating import fold_gate
from spa_dist.attention.module import SparseProjectionAttention
from spa_dist.attention.projection import PATTERNS, make_projection, num_projections
from spa_dist.attention.report import ProjectionReport, projection_report
from spa_dist.attention.rotary import apply_rotary, rotary_tables
from spa_dist.attention.widths import KINDS, logit_scale, query_key_lr_scale, query_key_width

__all__ = [
    "KINDS",
    "PATTERNS",
    "ProjectionReport",
    "SparseProjectionAttention",
    "apply_rotary",
    "fold_gate",
    "fold_projection",
    "logit_scale",
    "make_projection",
    "num_projections",
    "on_support",
    "project",
    "projection_report",
    "query_key_lr_scale",
    "query_key_width",
    "rotary_tables",
]
