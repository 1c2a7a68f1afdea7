"""The sweep config: one typed tree, checked like a run config.

Lengths are in tokens (input positions, as `run.tokens` counts them), since tokens are what trials of different batch sizes have in
common. Keys of a run config are written dotted, `attention.d_proj`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spa_dist.config.schema import Section

Number = int | float
Metric = Literal["validation_loss", "tokens_per_second", "flops_per_token", "cache_bytes_per_token", "parameters"]


class SpaceKey(Section):
    """The values that one key of the run config may take: exactly one of `grid`, `choice`, `uniform`, `log_uniform`."""

    grid: list[Any] | None = Field(None, min_length=1)
    """Every value is tried."""
    choice: list[Any] | None = Field(None, min_length=1)
    """One value is drawn, all alike likely."""
    uniform: tuple[Number, Number] | None = Field(None, strict=False)
    """Drawn between the two bounds, both included. Two integers draw integers."""
    log_uniform: tuple[Number, Number] | None = Field(None, strict=False)
    """As `uniform`, in the logarithm."""
    when: dict[str, list[Any]] = Field(default_factory=dict)
    """Other keys of the space → values at which this key takes part; elsewhere the base config's value stands."""

    @model_validator(mode="after")
    def _one_kind(self) -> "SpaceKey":
        given = [kind for kind in ("grid", "choice", "uniform", "log_uniform") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of grid, choice, uniform and log_uniform, not {' and '.join(given) or 'none'}")
        bounds = self.bounds
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError(f"{given[0]} {list(bounds)} is empty: the first bound must be below the second")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError(f"log_uniform {list(self.log_uniform)}: both bounds must be above 0")
        return self

    @property
    def values(self) -> list[Any] | None:
        """The listed values, of a grid or a choice."""
        return self.grid if self.grid is not None else self.choice

    @property
    def bounds(self) -> tuple[Number, Number] | None:
        """The two ends of a range."""
        return self.uniform if self.uniform is not None else self.log_uniform


class GridSearch(Section):
    """Every combination of the grids."""

    method: Literal["grid"] = "grid"


class RandomSearch(Section):
    """Independent draws; a `grid` in the space is tried in full with each draw of the rest."""

    method: Literal["random"]
    points: int = Field(gt=0)
    """Draws; with grids, draws per combination."""
    seed: int = Field(0, ge=0)


class OptunaSearch(Section):
    """Optuna's TPE on the mean over seeds, of one objective or several."""

    method: Literal["optuna"]
    points: int = Field(gt=0)
    seed: int = Field(0, ge=0)
    startup_points: int = Field(8, gt=0)
    """Points drawn at random before the model of the objective takes over."""


class NoScheduler(Section):
    """Every trial runs to its end."""

    name: Literal["none"] = "none"


class AshaScheduler(Section):
    """Asynchronous successive halving: at each rung the better 1/`reduction` of the points seen there goes on."""

    name: Literal["asha"]
    reduction: int = Field(3, ge=2)
    first_tokens: int | None = Field(None, gt=0)
    """The first rung, in tokens; default `trial.report_tokens`. A point whose sparsity warm-up is not over passes."""


class PbtScheduler(Section):
    """Population-based training, in step: all members reach an interval's end before any goes on."""

    name: Literal["pbt"]
    interval_tokens: int = Field(gt=0)
    quantile: float = Field(0.25, gt=0.0, le=0.5)
    """Share of members that take over the weights of a member in the best such share."""
    factors: tuple[float, float] = Field((0.8, 1.25), strict=False)
    """What a taken-over value is multiplied by, one or the other."""
    resample: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that a value is drawn anew instead."""
    seed: int = Field(0, ge=0)


class TrialConfig(Section):
    """What one trial is, and what it occupies."""

    tokens: int = Field(gt=0)
    """Length of a full trial."""
    report_tokens: int = Field(gt=0)
    """A trial is evaluated, and reports, each time it has trained on so many tokens; divides `tokens`."""
    workers: int = Field(1, gt=0)
    """Processes, one GPU each where there are GPUs."""
    tensor: int | None = Field(None, gt=0)
    """Tensor-parallel size; default the base config's, or what the space says."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """Also the number of threads of a worker."""
    gpus_per_worker: float = Field(0.0, ge=0.0, le=1.0)
    """1, or a share of a GPU for trials of one worker."""
    placement: Literal["PACK", "STRICT_PACK", "SPREAD"] = "PACK"
    """On as few nodes as possible, on one node, or over as many nodes as possible."""
    retries: int = Field(2, ge=0)
    """How often a trial that lost a process or a node starts again from its last checkpoint."""


class BudgetConfig(Section):
    """Where the sweep ends, whichever comes first. What runs then stops at its next report, and `--resume` with more budget goes on."""

    trials: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    """Tokens trained on, over all trials."""
    wall_minutes: float | None = Field(None, gt=0)
    gpu_hours: float | None = Field(None, gt=0)


class NodeConfig(Section):
    """What a node offers."""

    cpus: float = Field(gt=0)
    gpus: float = Field(0.0, ge=0)
    count: int = Field(1, gt=0)
    """Nodes of this kind."""


class ClusterConfig(Section):
    """Where the trials run: a Ray that the sweep starts here, or one that it joins."""

    address: str | None = None
    """Of a running Ray cluster, `auto` for the one of this machine; default: start one, for the length of the sweep."""
    nodes: list[NodeConfig] = Field(default_factory=list)
    """What is counted on, so that a trial that cannot fit is an error before Ray starts. Without an address there is one node, and
    its default is this machine; more CPUs than there are let more trials share them."""
    max_concurrent: int | None = Field(None, gt=0)
    """Most trials at a time; default: as many as fit."""


class SweepConfig(Section):
    """A whole sweep."""

    name: str = Field("sweep", pattern=r"^[A-Za-z0-9_.-]+$")
    dir: str | None = None
    """Folder of the sweep's files, on storage that every node shares; default `runs/<name>`."""
    base: str
    """The run config that the points change: a path, or a name in configs/."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the run config → values, for all trials."""
    space: dict[str, SpaceKey] = Field(min_length=1)
    objectives: list[Metric] = Field(["validation_loss"], min_length=1)
    """The first ranks the points; together they span the Pareto front."""
    search: Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="method")] = GridSearch()
    scheduler: Annotated[NoScheduler | AshaScheduler | PbtScheduler, Field(discriminator="name")] = NoScheduler()
    trial: TrialConfig
    seeds: list[int] = Field(default_factory=list)
    """Each point is trained once with each; default: the base config's seed alone."""
    budget: BudgetConfig = BudgetConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def sweep_dir(self) -> str:
        """Folder of the sweep's files."""
        return self.dir or f"runs/{self.name}"


MAXIMISED = frozenset({"tokens_per_second"})
"""Metrics of which more is better; of all others, less."""
