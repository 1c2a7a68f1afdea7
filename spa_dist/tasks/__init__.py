"""Tasks: batch → loss → metrics."""

from spa_dist.tasks.language_modelling import LanguageModelling

__all__ = ["LanguageModelling"]
