"""Which backend serves a call: the table of `auto`, and why a backend cannot serve."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spa_dist.kernels.cudnn import cudnn_attention, cudnn_refusal
from spa_dist.kernels.flex import flex_attention, flex_refusal
from spa_dist.kernels.problem import Problem
from spa_dist.kernels.reference import reference_attention
from spa_dist.kernels.sdpa import SHORT, sdpa_attention, sdpa_refusal
from spa_dist.kernels.single_query import is_single_query
from spa_dist.kernels.tiled import tiled_attention
from spa_dist.kernels.triton_backend import run_triton, triton_refusal

log = logging.getLogger(__name__)

Attention = Callable[[Problem, Tensor, Tensor, Tensor, Tensor | None], Tensor]


FEW_SCORES = 1 << 17
"""Up to here, at unequal widths, the overhead per call costs more than what the narrower product saves."""


class Backend(NamedTuple):
    """How to run a backend, and what it says (one line) about a problem that it cannot serve; None where it can."""

    run: Attention
    refusal: Callable[[Problem], str | None]


BACKENDS: dict[str, Backend] = {
    "triton": Backend(run_triton, triton_refusal),
    "cudnn": Backend(cudnn_attention, cudnn_refusal),
    "flex": Backend(flex_attention, flex_refusal),
    "tiled": Backend(tiled_attention, lambda p: None),
    "sdpa": Backend(sdpa_attention, sdpa_refusal),
    "reference": Backend(reference_attention, lambda p: None),
}


class CannotServe(ValueError):
    """A backend that was asked for by name cannot serve the call; the message says why."""


class Rule(NamedTuple):
    """A row of `auto`'s table: where `when` holds and the backend can serve, it is taken, because of `why`."""

    backend: str
    when: Callable[[Problem], bool]
    why: str


def _short_on_cpu(p: Problem) -> bool:
    if p.queries != p.keys:  # first, because decoding passes here for each token
        return False
    plain = not p.has_lengths and p.group == 1 and p.keys <= SHORT
    small = p.d_qk == p.d_v or p.batch * p.heads * p.queries * p.keys <= FEW_SCORES
    return p.device.type == "cpu" and p.dtype != torch.float64 and plain and small


def _decodes_dense_on_cpu(p: Problem) -> bool:
    equal = p.d_qk == p.d_v and p.group == 1
    return equal and p.device.type == "cpu" and p.dtype == torch.float32 and is_single_query(p)


def _half(p: Problem) -> bool:
    return p.dtype in (torch.float16, torch.bfloat16)


# On CPU measured (docs/results/kernels.md); on CUDA by the arithmetic, until somebody runs tools/gpu_suite.py and moves the rows.
AUTO: tuple[Rule, ...] = (
    Rule("sdpa", _short_on_cpu, f"at most {SHORT} keys, and little work, where torch's smaller overhead per call decides"),
    Rule("sdpa", _decodes_dense_on_cpu, "one query at equal widths, a single call of torch"),
    Rule("tiled", lambda p: p.device.type == "cpu", "tiles of whole score rows on the CPU's own matrix product"),
    Rule(
        "sdpa",
        lambda p: p.device.type == "cuda" and p.d_qk == p.d_v,
        "equal widths, which torch's fused kernels are made for",
    ),
    Rule("triton", lambda p: p.device.type == "cuda", "fused at the widths as they are"),
    Rule("cudnn", _half, "fused at unequal widths, and Triton cannot serve"),
    Rule("tiled", lambda p: True, "tiles of whole score rows on the device's own matrix product"),
)

_said: set[tuple[object, ...]] = set()


def choose(p: Problem) -> Rule:
    """The first row of the table that applies and whose backend can serve the problem."""
    for rule in AUTO:
        if rule.when(p) and BACKENDS[rule.backend].refusal(p) is None:
            return rule
    raise AssertionError("the last row of the table serves every problem")


def run(p: Problem, backend: str, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Run one backend by name, or the one that `auto` picks; ValueError says why a named one cannot serve."""
    if backend == "auto":
        rule = choose(p)
        _say(p, rule)
        backend = rule.backend
    elif backend not in BACKENDS:
        raise ValueError(f"attention: unknown backend {backend!r}, choose one of auto, {', '.join(BACKENDS)}")
    else:
        refusal = BACKENDS[backend].refusal(p)
        if refusal is not None:
            raise CannotServe(f"attention: backend {backend!r} cannot serve this call: {refusal}")
    return BACKENDS[backend].run(p, q, k, v, key_lengths)


def _say(p: Problem, rule: Rule) -> None:
    """Log a choice once per kind of problem."""
    if not log.isEnabledFor(logging.INFO):
        return
    kind = (rule, p.device.type, p.dtype, p.d_qk, p.d_v, p.needs_grad)
    if kind in _said or torch.compiler.is_compiling():
        return
    _said.add(kind)
    log.info(
        "attention: %s for %s %s, d_qk %d, d_v %d, %s: %s",
        rule.backend,
        p.device.type,
        str(p.dtype).removeprefix("torch."),
        p.d_qk,
        p.d_v,
        "training" if p.needs_grad else "inference",
        rule.why,
    )
