"""The user's mistakes, told apart from ours.

A `UserError` is something the person at the keyboard can put right: its text is one line that names the key or the file
and the way out. Commands print that line on stderr and exit with code 2 (`spa_dist.cli.run_command`). Our own mistakes stay
ordinary exceptions with their traceback.
"""


class UserError(Exception):
    """A mistake that the user can put right; its text is the one line that they read."""


class ConfigError(UserError):
    """The run config, or an override of it, cannot be used."""


class DataError(UserError):
    """A corpus, tokenizer, shard or index is missing, damaged, or does not match the others."""


class CheckpointError(UserError):
    """A checkpoint or an export is missing, damaged, or does not fit the run."""


class TrainingError(Exception):
    """The run cannot go on: its gradient stays non-finite, or a rank is lost. One line; exit code 3."""
