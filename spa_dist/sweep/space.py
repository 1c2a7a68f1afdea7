"""The search space: every combination of its grids, a draw, or what Optuna suggests. A point is dotted key → value."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from spa_dist.errors import ConfigError
from spa_dist.sweep.schema import SpaceKey

Values = dict[str, Any]
Space = dict[str, SpaceKey]
Pick = Callable[[str, SpaceKey], Any]


def ordered(space: Space) -> list[str]:
    """The keys, each after those that its `when` names.

    Raises:
        ConfigError: a condition on a key that is not in the space, on a value that it never takes, or in a circle.
    """
    for key, domain in space.items():
        for other, wanted in domain.when.items():
            _check_condition(space, key, other, wanted)
    order: list[str] = []
    while len(order) < len(space):
        ready = [key for key in space if key not in order and all(other in order for other in space[key].when)]
        if not ready:
            circle = sorted(set(space) - set(order))
            raise ConfigError(f"space: the conditions of {', '.join(circle)} wait for one another; remove one `when`")
        order.append(ready[0])
    return order


def _check_condition(space: Space, key: str, other: str, wanted: list[Any]) -> None:
    if other not in space:
        raise ConfigError(f"space.{key}.when: {other} is not a key of the space; it has {', '.join(space)}")
    values = space[other].values
    if values is None:
        raise ConfigError(f"space.{key}.when: {other} is a range; a condition needs a grid or a choice")
    if space[key].grid is not None and space[other].grid is None:
        raise ConfigError(f"space.{key}.when: {other} is drawn, and a grid cannot wait for a draw; make {key} a choice")
    for value in wanted:
        if value not in values:
            raise ConfigError(f"space.{key}.when: {other} never is {value!r}; it is one of {values}")


def _walk(space: Space, pick: Pick) -> Values:
    """One value for each key that takes part, in dependency order."""
    values: Values = {}
    for key in ordered(space):
        if _active(space[key], values):
            values[key] = pick(key, space[key])
    return {key: values[key] for key in space if key in values}


def _active(domain: SpaceKey, values: Values) -> bool:
    return all(other in values and values[other] in wanted for other, wanted in domain.when.items())


def combinations(space: Space) -> list[Values]:
    """Every combination of the listed values, the last key changing fastest; keys with a range are left out."""
    listed = [key for key in ordered(space) if space[key].grid is not None]

    def extend(values: Values, rest: list[str]) -> Iterator[Values]:
        if not rest:
            yield {key: values[key] for key in space if key in values}
            return
        key, *others = rest
        if not _active(space[key], values):
            yield from extend(values, others)
            return
        for value in space[key].grid or []:
            yield from extend(values | {key: value}, others)

    return list(extend({}, listed))


def draw(space: Space, seed: int, number: int, fixed: Values) -> Values:
    """Draw `number` of the sequence that `seed` names; a pure function of both. `fixed` values stand."""
    rng = random.Random(f"{seed}/{number}")
    return _walk(space, lambda key, domain: fixed[key] if key in fixed else draw_value(domain, rng))


def draw_value(domain: SpaceKey, rng: random.Random) -> Any:
    """One value of a domain."""
    if domain.bounds is None:
        assert domain.values
        return rng.choice(domain.values)
    low, high = domain.bounds
    if domain.uniform is not None:
        return rng.randint(int(low), int(high)) if is_integer(domain) else rng.uniform(low, high)
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    return min(max(round(value), low), high) if is_integer(domain) else min(max(value, low), high)


def is_integer(domain: SpaceKey) -> bool:
    """Whether a range draws integers: both of its bounds are."""
    return domain.bounds is not None and all(isinstance(bound, int) for bound in domain.bounds)


def suggest(space: Space, trial: Any) -> Values:
    """What an `optuna.Trial` suggests. Listed values go by their place in the list, so that a list may hold lists."""

    def pick(key: str, domain: SpaceKey) -> Any:
        if domain.bounds is None:
            assert domain.values
            return domain.values[trial.suggest_categorical(key, list(range(len(domain.values))))]
        low, high = domain.bounds
        log = domain.log_uniform is not None
        if is_integer(domain):
            return trial.suggest_int(key, low, high, log=log)
        return trial.suggest_float(key, float(low), float(high), log=log)

    return _walk(space, pick)


def probes(domain: SpaceKey) -> list[Any]:
    """Values that stand for a domain when its type is checked: each listed one, or both ends."""
    return domain.values if domain.values is not None else list(domain.bounds or ())
