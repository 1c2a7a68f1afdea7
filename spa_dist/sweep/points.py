"""From a point of the space to the run config of a trial."""

import contextlib
import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_pipeline.dataset import open_dataset
from spa_dist.config import Config, apply_override, config_from_dict, find_config, plan_batches, with_vocabulary
from spa_dist.config.load import read_json, unknown_keys
from spa_dist.errors import ConfigError
from spa_dist.sweep.schema import SweepConfig
from spa_dist.sweep.space import Values, probes

MANAGED = {
    "run.name": "the sweep",
    "run.dir": "the sweep",
    "run.seed": "seeds",
    "run.steps": "trial.tokens",
    "run.tokens": "trial.tokens",
    "evaluation.every": "trial.report_tokens",
    "evaluation.patience": "scheduler",
    "logging.progress": "the sweep",
    "provenance": "the sweep",
}
"""Key of the run config → what in the sweep config says it."""


class Points:
    """Builds the config of each trial from the base config, the sweep's own settings, a point and a seed."""

    def __init__(self, sweep: SweepConfig):
        """Read the base config and check every key and value of the space by its type.

        Raises:
            ConfigError: an unknown key, a value of the wrong type, or a base config that cannot be used.
        """
        self.sweep = sweep
        self._base = self._checked_base()
        for key, domain in sweep.space.items():
            self._check_key(key, f"space.{key}")
            for value in probes(domain):
                self._check_value(key, value)
        base = config_from_dict(self._base)
        self.seeds = sweep.seeds or [base.run.seed]
        self._vocabulary = open_dataset(base.data.path).vocab_size

    def _checked_base(self) -> dict[str, Any]:
        sweep = self.sweep
        tree = read_json(find_config(sweep.base))
        for key, value in sweep.set.items():
            self._check_key(key, f"set.{key}")
            put(tree, key, value)
        run = tree.setdefault("run", {})
        run.pop("steps", None)
        run["tokens"] = sweep.trial.tokens
        if sweep.trial.tensor is not None:
            put(tree, "parallel.tensor", sweep.trial.tensor)
        tree.pop("provenance", None)
        return tree

    def _check_key(self, key: str, where: str) -> None:
        owner = MANAGED.get(key) or MANAGED.get(key.split(".")[0])
        if owner is None and key == "parallel.tensor" and self.sweep.trial.tensor is not None:
            owner = "trial.tensor"
        if owner is not None:
            raise ConfigError(f"{where}: {key} is set by {owner}; remove it")
        tree: dict[str, Any] = {}
        put(tree, key, None)
        unknown = next(unknown_keys(tree, Config), None)
        if unknown is not None:
            raise ConfigError(f"{where}: {unknown}")
        if "." not in key:
            raise ConfigError(f"{where}: {key} is a section; write {key}.<key>")

    def _check_value(self, key: str, value: Any) -> None:
        tree = copy.deepcopy(self._base)
        put(tree, key, value)
        try:
            Config.model_validate(tree)
        except ValidationError as error:
            for mistake in error.errors():
                if [str(part) for part in mistake["loc"]][: key.count(".") + 1] == key.split("."):
                    message = mistake["msg"][0].lower() + mistake["msg"][1:]
                    raise ConfigError(f"space.{key}: {value!r} is no value of {key}: {message}") from None

    def config(self, values: Values, seed: int, name: str) -> Config:
        """The resolved config of one trial.

        Raises:
            ConfigError: the point is infeasible; the line says why.
        """
        tree = copy.deepcopy(self._base)
        for key in sorted(values, key=lambda key: key.count(".")):  # a section before what is in it
            put(tree, key, values[key])
        put(tree, "run.seed", seed)
        put(tree, "run.name", name)
        put(tree, "run.dir", str(self.trial_dir(name)))
        put(tree, "evaluation.patience", None)
        put(tree, "logging.progress", False)
        with _said_by_the_trial():
            config = with_vocabulary(config_from_dict(tree), self._vocabulary)
        plan = plan_batches(config, self.sweep.trial.workers)
        every = self.sweep.trial.report_tokens
        if every % plan.tokens_per_step:
            raise ConfigError(
                f"trial.report_tokens={every} is not a multiple of the {plan.tokens_per_step} tokens of a step (batch.global_size "
                "× model.sequence_length), and trials are compared at equal tokens"
            )
        put(tree, "evaluation.every", every // plan.tokens_per_step)
        put(tree, "data.path", str(Path(config.data.path).absolute()))
        with _said_by_the_trial():
            return with_vocabulary(config_from_dict(tree), self._vocabulary)

    def examine(self, values: Values) -> dict[str, Any]:
        """Why a point cannot be trained (`infeasible`, None where it can), and the length of its sparsity warm-up."""
        try:
            config = self.config(values, self.seeds[0], "probe")
        except ConfigError as error:
            return {"infeasible": str(error), "warmup_tokens": 0}
        return {"infeasible": None, "warmup_tokens": sparsity_warmup_tokens(config)}

    def trial_dir(self, name: str) -> Path:
        """Folder of a trial's run."""
        return Path(self.sweep.sweep_dir).absolute() / "trials" / name


@contextlib.contextmanager
def _said_by_the_trial() -> Iterator[None]:
    """Without the warnings of options that have no effect at a point: a space has many, and each trial's own log says them."""
    rules = logging.getLogger("spa_dist.config.rules")
    rules.disabled = True
    try:
        yield
    finally:
        rules.disabled = False


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `section.key` in a nested dict."""
    apply_override(tree, f"{dotted}={json.dumps(value)}")


def sparsity_warmup_tokens(config: Config) -> int:
    """Tokens until S is as sparse as its schedule makes it: the last pruning of a magnitude mask, the end of λ's rise for gates; 0 where
    S is not learned."""
    mask = config.attention.mask
    if mask is None or not config.attention.learns_mask:
        return 0
    steps = (mask.magnitude.last_step or 0) if mask.method == "magnitude" and mask.magnitude else mask.l0_warmup_steps
    return steps * config.batch.global_size * config.model.sequence_length
