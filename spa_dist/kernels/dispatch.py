"""Which backend serves a call: the table of `auto`, and why a backend cannot serve."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spa_dist.kernels.problem import Problem
from spa_dist.kernels.reference import reference_attention
from spa_dist.kernels.sdpa import sdpa_attention, sdpa_refusal
from spa_dist.kernels.tiled import tiled_attention

log = logging.getLogger(__name__)

Attention = Callable[[Problem, Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Backend(NamedTuple):
    """How to run a backend, and what it says (one line) about a problem that it cannot serve; None where it can."""

    run: Attention
    refusal: Callable[[Problem], str | None]


BACKENDS: dict[str, Backend] = {
    "tiled": Backend(tiled_attention, lambda p: None),
    "sdpa": Backend(sdpa_attention, sdpa_refusal),
    "reference": Backend(reference_attention, lambda p: None),
}


class Rule(NamedTuple):
    """A row of `auto`'s table: where `when` holds and the backend can serve, it is taken, because of `why`."""

    backend: str
    when: Callable[[Problem], bool]
    why: str


AUTO: tuple[Rule, ...] = (Rule("tiled", lambda p: True, "tiles of whole score rows on the device's own matrix product"),)

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
            raise ValueError(f"attention: backend {backend!r} cannot serve this call: {refusal}")
    return BACKENDS[backend].run(p, q, k, v, key_lengths)


def _say(p: Problem, rule: Rule) -> None:
    """Log a choice once per kind of problem."""
    kind = (rule.backend, p.device.type, p.dtype, p.d_qk, p.d_v, p.needs_grad)
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
