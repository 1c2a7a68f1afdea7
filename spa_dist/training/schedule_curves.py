"""Every schedule of a run as a function of the step, to be drawn."""

from collections.abc import Callable

from spa_dist.config import Config
from spa_dist.config.batch import total_steps
from spa_dist.model.build import initial_sparsity
from spa_dist.model.masks import mask_method, penalty_schedule, pruning_schedule, temperature_schedule
from spa_dist.training.schedule import learning_rate

Curves = dict[str, Callable[[int], float]]


def schedule_curves(config: Config) -> tuple[Curves, list[int]]:
    """(label → value at a step, steps that a mask update follows)."""
    steps, method = total_steps(config), mask_method(config)
    curves: Curves = {"learning rate": lambda step: learning_rate(step, config.optimizer.lr, config.schedule, steps)}
    updates: list[int] = []
    pruning = pruning_schedule(config)
    if method is not None and method.name == "magnitude" and pruning is not None:
        initial = initial_sparsity(config)
        updates = [step for step in range(1, steps + 1) if pruning.due(step)]
        curves["sparsity"] = lambda step: pruning.sparsity(step, initial)
        if pruning.regrow:
            curves["regrown share"] = pruning.regrow_share
    if method is not None and method.name == "gumbel":
        curves["temperature"] = temperature_schedule(config).at
    if method is not None and method.has_gates:
        curves["λ"] = penalty_schedule(config).at
    return curves, updates
