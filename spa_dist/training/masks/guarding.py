"""The guard at work in a run: it names layer and quantity, says what to change, and warns, repairs or stops."""

import logging
import math

import torch

from spa_dist.attention.masks import (
    Fault,
    LearnedProjection,
    MaskReport,
    dropped_for,
    mask_report,
    repaired_support,
    revived_values,
)
from spa_dist.config import Config
from spa_dist.errors import TrainingError
from spa_dist.model.masks import guard, mask_method
from spa_dist.parallel.layout import parameter_layout
from spa_dist.training.engine import Engine
from spa_dist.training.masks.snapshot import Snapshot, take_snapshot
from spa_dist.training.masters import write_masters

logger = logging.getLogger(__name__)


class MaskGuard:
    """Looks at snapshots. Every rank sees the same ones and decides alike."""

    def __init__(self, config: Config, projections: dict[str, LearnedProjection]):
        self._config, self._projections, self._guard = config, projections, guard(config)
        mask = config.attention.mask
        self._action = mask.guard.action if mask else "warn"
        self._known: set[tuple[str, str]] = set()

    def look(self, engine: Engine, snapshot: Snapshot, step: int) -> tuple[Snapshot, dict[str, MaskReport], int]:
        """The snapshot and the report of each S, after the repair where there was one, and the number of faults found.

        A fault is reported when it first appears. Collective, like taking a snapshot.

        Raises:
            TrainingError: where the config says that a fault stops the run.
        """
        reports = _reports(snapshot)
        found: list[tuple[str, Fault]] = []
        for name, report in reports.items():
            shape = snapshot.projections[name].shape
            found += [(name, fault) for fault in self._guard.faults(report, (shape[1], shape[2]))]
        for name, gates in snapshot.gates.items():
            found += [(name, fault) for fault in self._guard.gate_faults(gates)]
        for name, fault in found:
            if (name, fault.quantity) not in self._known:
                self._report(name, fault, step)
        self._known = {(name, fault.quantity) for name, fault in found}
        mended = {name for name, fault in found if fault.repairable and self._action == "repair"}
        if mended:
            self._repair(engine, snapshot, mended)
            snapshot = take_snapshot(engine, self._projections)
            reports = _reports(snapshot)
        return snapshot, reports, len(found)

    def _report(self, name: str, fault: Fault, step: int) -> None:
        line = f"step {step}, {name}: {fault.message}; {self._advice(fault)}"
        if self._action == "stop":
            raise TrainingError(f"{line} (attention.mask.guard.action=stop ended the run)")
        repaired = self._action == "repair" and fault.repairable
        logger.warning("%s%s", line, "; repaired" if repaired else "")

    def _advice(self, fault: Fault) -> str:
        mask, method = self._config.attention.mask, mask_method(self._config)
        if fault.quantity == "gate":
            return "lower optimizer.lr, set attention.lr_scale='matched' (W_Q and W_K), or attention.scale='unbiased' (smaller logits)"
        if fault.quantity == "values" or mask is None or method is None:
            return "lower optimizer.lr or optimizer.clip_norm"
        if fault.quantity == "density" and not fault.repairable:
            return "raise attention.mask.l0_lambda, or attention.sparsity for magnitude"
        if method.has_gates:
            return (
                f"lower attention.mask.l0_lambda (now {mask.l0_lambda:g}, of the {mask.l0_reduction}), or lengthen "
                f"attention.mask.l0_warmup_steps (now {mask.l0_warmup_steps})"
            )
        if method.name == "magnitude":
            return (
                f"lower attention.sparsity (now {self._config.attention.sparsity:g}), regrow (attention.mask.magnitude.regrow), "
                "or set attention.mask.guard.action='repair'"
            )
        return "lower optimizer.weight_decay or optimizer.lr"

    def _repair(self, engine: Engine, snapshot: Snapshot, names: set[str]) -> None:
        values: dict[str, torch.Tensor] = {}
        for name in sorted(names & snapshot.projections.keys()):
            values |= self._mended(engine, name, snapshot)
        limit = math.log(self._guard.max_gate)
        for name in sorted(names & snapshot.gates.keys()):
            values[name] = snapshot.gates[name].log().nan_to_num(0.0).clamp(-limit, limit)
        if values:
            _write_changes(engine, snapshot, values)

    def _mended(self, engine: Engine, name: str, snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """New tensors of one S, and for a magnitude mask the mask itself set: its number of entries stays."""
        projection, parts = snapshot.projections[name], snapshot.tensors[name]
        weight = parts["weight"]
        added = torch.stack([repaired_support(s, w, self._guard) for s, w in zip(projection, weight)])
        weight = torch.stack([revived_values(s, w, a) for s, w, a in zip(projection, weight, added)])
        if "mask" in parts:
            mask = parts["mask"].bool()
            dropped = torch.stack([dropped_for(w, m, a) for w, m, a in zip(weight, mask, added)])
            entry, grid = parameter_layout(self._config)[f"{name}.mask"], engine.grid
            mended = (mask | added) & ~dropped
            self._projections[name].mask.copy_(entry.local_part(mended, grid.tensor_rank, grid.tensor_size))
            weight = weight * ~dropped
        values = {f"{name}.weight": weight}
        if "mask_logits" in parts:
            method = self._projections[name].method
            opened = method.initial(torch.ones(1))["mask_logits"].to(weight.device)
            values[f"{name}.mask_logits"] = torch.where(added, opened, parts["mask_logits"])
        return values


def _reports(snapshot: Snapshot) -> dict[str, MaskReport]:
    return {name: mask_report(s, snapshot.supports[name]) for name, s in snapshot.projections.items()}


def _write_changes(engine: Engine, snapshot: Snapshot, values: dict[str, torch.Tensor]) -> None:
    layout, grid = parameter_layout(engine.config), engine.grid
    before = {f"{name}.{key}": t for name, parts in snapshot.tensors.items() for key, t in parts.items()}
    before |= {name: gate.log() for name, gate in snapshot.gates.items()}
    local = {name: layout[name].local_part(value, grid.tensor_rank, grid.tensor_size) for name, value in values.items()}
    forget = {
        name: layout[name].local_part(value != before[name], grid.tensor_rank, grid.tensor_size)
        for name, value in values.items()
    }
    write_masters(engine, local, forget)
