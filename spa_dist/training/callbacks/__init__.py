"""Callbacks of the trainer, one file each."""

from spa_dist.training.callbacks.base import Callback
from spa_dist.training.callbacks.checkpointing import Checkpointing
from spa_dist.training.callbacks.evaluation import Evaluation
from spa_dist.training.callbacks.masks import MaskTraining
from spa_dist.training.callbacks.metrics import MetricsLog
from spa_dist.training.callbacks.progress import Progress
from spa_dist.training.callbacks.tensorboard import TensorBoard

__all__ = ["Callback", "Checkpointing", "Evaluation", "MaskTraining", "MetricsLog", "Progress", "TensorBoard"]
