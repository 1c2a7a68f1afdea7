"""A trial: a Tune function that runs a Ray Train job on its placement group, forwards its reports, and starts it again when it breaks.

The function and Ray Train's controller sit on the head node and hold no CPU; the workers are what a node is asked for. A trial ends in
order, its processes by themselves, so that its placement group and everything around it goes with it.
"""

import json
import queue
import shutil
import threading
from typing import Any

import ray
import ray.train
import ray.tune
from ray.train.torch import TorchConfig, TorchTrainer

from spa_dist.export.manifest import MANIFEST
from spa_dist.sweep.job import FAILURE, TrialSpec
from spa_dist.sweep.mailbox import find_mailbox

POLL_SECONDS = 0.2


def train_worker(config: dict[str, str]) -> None:
    """What each worker runs. Only workers import the training stack, which costs seconds and half a gigabyte a process."""
    from spa_dist.sweep.worker import work

    work(TrialSpec.loads(config["spec"]))


class ForwardReports(ray.train.UserCallback):
    """Posts each report of the first rank; Ray Train itself keeps only those that come with a checkpoint of its own."""

    def __init__(self, spec: TrialSpec):
        self._spec = spec

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Called in the controller once every rank has reported."""
        ray.get(find_mailbox(self._spec.mailbox).post.remote(self._spec.trial, metrics[0]))


def run_trial(config: dict[str, str]) -> dict[str, Any]:
    """The Tune function. What it returns is how the trial ended; an error of its own is an end like others."""
    spec = TrialSpec.loads(config["spec"])
    spec.folder.mkdir(parents=True, exist_ok=True)
    try:
        return {"ended": _run_with_retries(spec)}
    except Exception as error:
        return {"ended": {"status": "crashed", "reason": _failure(spec, error)["reason"]}}


def _run_with_retries(spec: TrialSpec) -> dict[str, str]:
    if spec.donor_checkpoints is not None:
        adopt_checkpoint(spec)
    failure: dict[str, Any] = {}
    for attempt in range(spec.retries + 1):
        (spec.folder / FAILURE).unlink(missing_ok=True)
        error = _attempt(spec, attempt)
        if error is None:
            return {"status": "done"}
        failure = _failure(spec, error)
        if failure["final"]:
            break
        ray.tune.report({"retry": {"attempt": attempt + 1, "reason": failure["reason"]}})
    return {"status": failure["status"], "reason": failure["reason"]}


def _attempt(spec: TrialSpec, attempt: int) -> Exception | None:
    """Train until the workers end; their reports go to Tune as they come. Returns what broke."""
    mailbox = find_mailbox(spec.mailbox)
    outcome: queue.Queue[Exception | None] = queue.Queue()

    def fit() -> None:
        try:
            trainer_for(spec, attempt).fit()
            outcome.put(None)
        except Exception as error:
            outcome.put(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    alive = True
    while alive:
        thread.join(POLL_SECONDS)
        alive = thread.is_alive()  # before the last look, so that nothing is posted after it
        for report in ray.get(mailbox.collect.remote(spec.trial)):
            ray.tune.report(report)
    return outcome.get()


def trainer_for(spec: TrialSpec, attempt: int) -> TorchTrainer:
    """The Ray Train job of a trial."""
    return TorchTrainer(
        train_worker,
        train_loop_config={"spec": spec.dumps()},
        torch_config=TorchConfig(timeout_s=int(spec.timeout_seconds)),
        scaling_config=ray.train.ScalingConfig(**spec.scaling),
        run_config=ray.train.RunConfig(
            name=f"{spec.mailbox}-{attempt}",
            storage_path=str(spec.folder / "ray"),
            callbacks=[ForwardReports(spec)],  # type: ignore[list-item]
            failure_config=ray.train.FailureConfig(max_failures=0),
        ),
    )


def _failure(spec: TrialSpec, error: Exception) -> dict[str, Any]:
    """How a broken attempt is told: what the run wrote down is final, anything else is worth another attempt."""
    (spec.folder / "error.txt").write_text(str(error), encoding="utf-8")
    note = spec.folder / FAILURE
    if note.exists():
        return json.loads(note.read_text(encoding="utf-8")) | {"final": True}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"status": "crashed", "reason": (lines[-1] if lines else type(error).__name__)[:300], "final": False}


def adopt_checkpoint(spec: TrialSpec) -> None:
    """Put the donor's checkpoint in the place of the trial's own of the same step, unless the trial has gone on from it already.

    A checkpoint without its manifest is none, so the manifest is the last thing that is put in place.
    """
    assert spec.donor_checkpoints is not None
    name = f"step_{spec.donor_step:08d}"
    marker = spec.folder / "adopted.jsonl"
    entry = json.dumps({"step": spec.donor_step, "donor": spec.donor_checkpoints})
    if marker.exists() and entry in marker.read_text(encoding="utf-8").splitlines():
        return
    own = spec.folder / "checkpoints"
    own.mkdir(parents=True, exist_ok=True)
    for folder in own.glob("step_*"):
        if folder.name >= name:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
    source = f"{spec.donor_checkpoints}/{name}"
    shutil.copytree(source, own / name, ignore=shutil.ignore_patterns(MANIFEST))
    shutil.copyfile(f"{source}/{MANIFEST}", own / name / f"{MANIFEST}.tmp")
    (own / name / f"{MANIFEST}.tmp").replace(own / name / MANIFEST)
    with marker.open("a", encoding="utf-8") as file:
        file.write(entry + "\n")
