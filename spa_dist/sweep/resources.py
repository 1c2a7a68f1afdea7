"""Whether a trial fits a cluster, and how many fit at a time."""

from dataclasses import dataclass

from spa_dist.errors import ConfigError
from spa_dist.sweep.schema import TrialConfig


@dataclass(frozen=True)
class Node:
    """What one machine offers to Ray."""

    cpus: float
    gpus: float


def workers_on(node: Node, trial: TrialConfig) -> int:
    """How many workers of a trial a node holds."""
    slack = 1e-6  # shares of a GPU are decimal fractions
    room = (node.cpus + slack) // trial.cpus_per_worker
    if trial.gpus_per_worker:
        room = min(room, (node.gpus + slack) // trial.gpus_per_worker)
    return int(room)


def trials_at_a_time(nodes: list[Node], trial: TrialConfig) -> int:
    """How many trials fit the nodes together.

    Raises:
        ConfigError: not even one fits.
    """
    rooms = [workers_on(node, trial) for node in nodes]
    together = trial.placement == "STRICT_PACK"
    count = sum(room // trial.workers for room in rooms) if together else sum(rooms) // trial.workers
    if count:
        return count
    need = f"{trial.workers} × ({trial.cpus_per_worker:g} CPU, {trial.gpus_per_worker:g} GPU)"
    have = ", ".join(f"({node.cpus:g} CPU, {node.gpus:g} GPU)" for node in nodes) or "no node"
    where = " on one node" if together else ""
    raise ConfigError(
        f"trial: a trial needs {need}{where}, and the cluster has {have}: lower trial.workers, trial.cpus_per_worker or "
        "trial.gpus_per_worker, or name a larger cluster in cluster.nodes"
    )
