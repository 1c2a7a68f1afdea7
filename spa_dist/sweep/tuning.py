"""Ray Tune's side of a sweep: Tune asks for trials, and hands over what they report; `Control` decides."""

from typing import Any

import ray.tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from spa_dist.sweep.control import Control
from spa_dist.sweep.job import TrialSpec
from spa_dist.sweep.jobs import Job, Wait
from spa_dist.sweep.live import Display


class _DriverOnly:
    """Tune pickles what it is given, to save an experiment that it may restore; the ledger does that here."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class JobSearcher(_DriverOnly, Searcher):
    """Gives Tune the next trial."""

    def __init__(self, control: Control, specs: "SpecBuilder"):
        super().__init__()
        self._control, self._specs = control, specs

    def suggest(self, trial_id: str) -> Any:
        """A trial's config, None to wait, or that there are no more."""
        job = self._control.next_job()
        if job is None:
            return Searcher.FINISHED
        return None if isinstance(job, Wait) else {"trial": job.trial, "spec": self._specs.build(job).dumps()}

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """`ReportListener` hears of it."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger holds it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger holds it."""


class ReportListener(_DriverOnly, FIFOScheduler):
    """Takes in each report and answers it; Tune itself never stops a trial."""

    def __init__(self, control: Control, mailbox: Any):
        super().__init__()
        self._control, self._mailbox = control, mailbox

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Record a report or how the trial ended."""
        name = trial.config["trial"]
        if "ended/status" in result:
            if name in self._control.running:
                self._control.ended(name, result["ended/status"], result.get("ended/reason", ""))
        elif "retry/attempt" in result:
            event = {"event": "retry", "trial": name, "reason": result["retry/reason"]}
            self._control.record(event)
        elif "tokens" in result:
            metrics = {key: result[key] for key in REPORTED if key in result}
            answer = self._control.reported(name, metrics)
            self._mailbox.put_answer.remote(name, result["tokens"], answer)
        return TrialScheduler.CONTINUE


REPORTED = (
    "tokens", "step", "validation_loss", "initial_loss", "tokens_per_second", "flops_per_token", "cache_bytes_per_token", "parameters",
)  # fmt: skip
"""What is kept of a report; Tune adds a dozen fields of its own."""


class TrialWatcher(_DriverOnly, ray.tune.Callback):
    """Hears of starts and of trials that broke, and keeps the display fresh."""

    def __init__(self, control: Control, display: Display):
        self._control, self._display = control, display

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The trial's function is about to run."""
        self._control.started(trial.config["trial"])

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The process of the trial's own function died, which no retry inside it can mend."""
        name = trial.config["trial"]
        if name in self._control.running:
            self._control.ended(name, "crashed", "the process that watches over the trial died on the head node")

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Between two events."""
        self._display.refresh()


class SpecBuilder:
    """From a job to what a trial is handed."""

    def __init__(self, control: Control, mailbox: str):
        self._control, self._mailbox = control, mailbox

    def build(self, job: Job) -> TrialSpec:
        """The spec of one job."""
        control, trial = self._control, self._control.sweep.trial
        known = control.state.trials[job.trial]
        config = control.points.config(control.state.points[known.point].values, known.seed, job.trial)
        donor, step_tokens = job.donor, config.batch.global_size * config.model.sequence_length
        resources = {"CPU": trial.cpus_per_worker} | ({"GPU": trial.gpus_per_worker} if trial.gpus_per_worker else {})
        return TrialSpec(
            trial=job.trial,
            run_dir=config.run_dir,
            config=config.model_dump(mode="json"),
            stop_at=job.stop_at,
            report_tokens=trial.report_tokens,
            mailbox=self._mailbox,
            donor_checkpoints=str(control.points.trial_dir(donor.trial) / "checkpoints") if donor else None,
            donor_step=donor.tokens // step_tokens if donor else 0,
            scaling={
                "num_workers": trial.workers,
                "use_gpu": trial.gpus_per_worker > 0,
                "resources_per_worker": resources,
                "placement_strategy": trial.placement,
            },
            retries=trial.retries,
            timeout_seconds=60 * config.parallel.timeout_minutes,
        )
