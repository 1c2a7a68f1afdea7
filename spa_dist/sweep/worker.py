"""One process of a trial: the same run as `launch/pretrain.py`, with a callback that reports after each evaluation by tokens.

Ray Train has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*, and made the world's process group, which the run takes over.
"""

import contextlib
import fcntl
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import ray.train
import torch.distributed as dist

from spa_dist.config import config_from_dict
from spa_dist.errors import TrainingError, UserError
from spa_dist.model.cache import cache_bytes_per_token
from spa_dist.model.flops import training_flops_per_token
from spa_dist.parallel.groups import Launch
from spa_dist.sweep.job import FAILURE, TrialSpec
from spa_dist.sweep.mailbox import find_mailbox
from spa_dist.training.callbacks import Callback
from spa_dist.training.callbacks.metrics import read_metrics
from spa_dist.training.plan import parameter_counts
from spa_dist.training.run import train

if TYPE_CHECKING:
    from spa_dist.training.trainer import StepReport, Trainer

PROCESSES = "processes.jsonl"
LOCK_SECONDS = 60.0
VERDICT_SECONDS = 600.0


class TokenReports(Callback):
    """Reports each time the run has trained on another `report_tokens`, and obeys the answer."""

    def __init__(self, spec: TrialSpec):
        self._spec = spec
        self._facts: dict[str, Any] = {}

    def on_start(self, trainer: "Trainer") -> None:
        """Say again what the checkpoint found: the process that wrote it may have ended before it could report."""
        config = trainer.config
        self._facts = {
            "flops_per_token": training_flops_per_token(config),
            "cache_bytes_per_token": cache_bytes_per_token(config),
            "parameters": parameter_counts(config)[0],
        }
        tokens = trainer.state.step * trainer.plan.tokens_per_step
        adopted = self._spec.donor_checkpoints is not None and trainer.state.step == self._spec.donor_step
        if tokens and tokens % self._spec.report_tokens == 0 and not adopted:
            self._report(trainer, tokens)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Report when it is due. Collective."""
        tokens = report.step * trainer.plan.tokens_per_step
        if tokens % self._spec.report_tokens == 0:
            self._report(trainer, tokens)

    def _report(self, trainer: "Trainer", tokens: int) -> None:
        metrics: dict[str, Any] = {"tokens": tokens, "step": trainer.state.step, **self._facts}
        metrics |= {"validation_loss": trainer.state.validation_loss, "initial_loss": trainer.state.initial_loss}
        if trainer.grid.is_first:
            metrics["tokens_per_second"] = measured_rate(self._spec.folder / "metrics.jsonl")
        ray.train.report(metrics)
        answer: list[Any] = [None]
        if trainer.grid.is_first:
            mailbox = find_mailbox(self._spec.mailbox)
            answer[0] = ray.get(mailbox.answer.remote(self._spec.trial, tokens), timeout=VERDICT_SECONDS)
        dist.broadcast_object_list(answer, src=0)
        if answer[0] is not None:
            trainer.stop_reason = f"the sweep stops it: {answer[0]}"
        elif tokens >= self._spec.stop_at and trainer.state.step < trainer.plan.steps:
            trainer.stop_reason = "end of the interval"


def measured_rate(path: Path) -> float | None:
    """Median tokens per second of a run's log, without its first line, which holds the warming up; None where there is none."""
    rates = [line["tokens_per_second"] for line in read_metrics(path) if "tokens_per_second" in line]
    return statistics.median(rates[1:] or rates) if rates else None


def work(spec: TrialSpec) -> None:
    """Train one trial's share in this process; a user's or a run's own mistake is written down for the trial to tell."""
    launch = Launch.from_environment()
    spec.folder.mkdir(parents=True, exist_ok=True)
    _record_process(spec, launch)
    _log_to_file(spec, launch)
    writer = only_writer(spec.folder) if launch.rank == 0 else contextlib.nullcontext()
    try:
        with writer:
            train(config_from_dict(spec.config), launch, resume=True, callbacks=[TokenReports(spec)])
    except (UserError, TrainingError) as error:
        kind = "infeasible" if isinstance(error, UserError) else "crashed"
        note = json.dumps({"status": kind, "reason": " ".join(str(error).split())})
        (spec.folder / FAILURE).write_text(note, encoding="utf-8")
        raise


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a run's folder; a process of an earlier attempt that is still on its way out is waited for.

    Raises:
        TrainingError: it does not end.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    with (folder / "writer.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TrainingError(f"{folder} is held by another process that trains into it") from None
                time.sleep(0.2)
        yield


def _record_process(spec: TrialSpec, launch: Launch) -> None:
    """Who works here, so that it can be counted that nobody stays."""
    own = psutil.Process()
    line = {
        "trial": spec.trial,
        "rank": launch.rank,
        "pid": own.pid,
        "created": own.create_time(),
        "host": os.uname().nodename,
        "node": ray.get_runtime_context().get_node_id(),
        "time": time.time(),
    }
    with (spec.folder / PROCESSES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _log_to_file(spec: TrialSpec, launch: Launch) -> None:
    package = logging.getLogger("spa_dist")
    package.setLevel(logging.INFO if launch.rank == 0 else logging.ERROR)
    handler = logging.FileHandler(spec.folder / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {launch.rank}: %(message)s"))
    package.addHandler(handler)
