"""The section `attention.mask`: how the mask of a learned S is trained. Patterns `learned` and `adaptive` read it."""

from typing import Literal

from pydantic import Field

from spa_dist.config.section import Section

StartPattern = Literal["random", "block", "banded", "hierarchical", "conv", "head_specific", "gaussian"]


class MagnitudeConfig(Section):
    """Prune to `attention.sparsity`, the smallest weights first; optionally regrow where the gradient is largest."""

    schedule: Literal["cubic", "constant"] = "cubic"
    """`cubic`: s_f + (s_i − s_f)(1 − t)³ between first_step and last_step; `constant`: s_f from the first update on."""
    first_step: int = Field(0, ge=0)
    last_step: int | None = Field(None, gt=0)
    """Last update, after which the mask stays; default three quarters of the run."""
    regrow: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the kept entries that an update takes by gradient magnitude, falling to 0 at last_step; 0 only prunes."""


class GumbelConfig(Section):
    """Binary concrete gates, straight-through."""

    temperature: float = Field(1.0, gt=0)
    final_temperature: float = Field(0.1, gt=0)
    schedule: Literal["geometric", "linear"] = "geometric"
    first_step: int = Field(0, ge=0)
    last_step: int | None = Field(None, gt=0)
    """Where the final temperature is reached; default the end of the run."""


class L0Config(Section):
    """Hard concrete gates; the constants of Louizos et al. (2018)."""

    beta: float = Field(2 / 3, gt=0)
    gamma: float = Field(-0.1, lt=0)
    zeta: float = Field(1.1, gt=1)


class GuardConfig(Section):
    """What a healthy S is, and what happens when one is not. Looked at every `attention.mask.every` steps."""

    action: Literal["warn", "repair", "stop"] = "warn"
    """`repair` switches entries on, the fewest that mend S, and pulls gates back into their range."""
    min_density: float = Field(0.01, ge=0.0, le=1.0)
    max_density: float = Field(1.0, ge=0.0, le=1.0)
    max_empty_rows: float = Field(0.25, ge=0.0, le=1.0)
    """Share of a head's rows that may be empty. Columns may not: each narrows attention by one."""
    max_gate: float = Field(8.0, gt=1.0)
    """A head's temperature exp(g) stays between 1 / max_gate and max_gate."""


class MaskConfig(Section):
    """How M of S = M ⊙ W is trained. The chosen method's section must be there, `{}` for its defaults."""

    method: Literal["gumbel", "l0", "magnitude", "none"]
    """`none`: no mask, S dense and learned."""
    start: StartPattern = "gaussian"
    """Pattern that S is drawn from at the start; its zeros are masked at first, or their gates closed."""
    start_sparsity: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of zeros asked of the start pattern. `magnitude` prunes from what the start really has."""
    initial_probability: float = Field(0.9, gt=0.5, lt=1.0)
    """Of a gate on the start's support to be open; off the support it is 1 minus this."""
    every: int = Field(100, gt=0)
    """Steps between updates of a magnitude mask, and between looks at S for the log and the guard."""
    l0_lambda: float = Field(1e-5, ge=0.0)
    """λ on the gate probability (`gumbel` and `l0`); the paper's 1e-5."""
    l0_reduction: Literal["mean", "sum"] = "mean"
    """λ multiplies the mean gate probability of the model, or the expected number of open gates."""
    l0_warmup_steps: int = Field(0, ge=0)
    """λ rises linearly over these steps."""
    lr_scale: float = Field(1.0, gt=0)
    """Learning rate of the gates' logits as a multiple of the model's. Adam moves a logit by about lr a step, and a gate has to
    move by a few units to open or close: short runs need 10 or more."""
    guard: GuardConfig = GuardConfig()
    magnitude: MagnitudeConfig | None = None
    gumbel: GumbelConfig | None = None
    l0: L0Config | None = None
