"""Ray Tune's trainable for a trial, which trains to the next evaluation, reports it, and can be stopped, saved and
resumed.

The same process and its other workers run one trial after another (Tune's `reuse_actors`). Tune's checkpoint of a trial
is a small file with the path of the folder where the workers wrote the state.
"""

import json
import logging
import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from scaleray.common import metric_names as names
from scaleray.common.filesystems import write_whole
from scaleray.errors import NonFiniteLossError
from scaleray.sweeps.search_space import LEARNING_RATE, Settings
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.trial_workers import LostWorkersError, TrialGroup
from scaleray.training.state.pausable_training import Ended, Paused, StepwiseTraining

# keys of a trial's config and results, which schedulers and the driver read
NUMBER, SETTINGS, RATE = "number", "settings", "learning_rate"
VALUE, SAMPLES, SECONDS, EVALUATION, STATUS, DETAIL = "value", "samples", "seconds", "evaluation", "status", "detail"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class SharedPlan:
    """Facts shared by all trials of a sweep. state_path: folder of the sweep for states of trials."""

    plan: SweepPlan
    pauses: bool
    state_path: str


class SweepTrial(tune.Trainable):
    """Runs one trial after another in one placement group."""

    def setup(self, config: dict[str, Any], shared: Any = None) -> None:
        """Start the workers. shared: reference to a SharedPlan, in a list so that Tune does not resolve it."""
        import ray

        for name in ("ray.tune", "ray.train"):  # they would give advice already followed, and log every state
            logging.getLogger(name).setLevel(logging.ERROR)
        self.shared: SharedPlan = ray.get(shared[0])
        self.group: TrialGroup | None = None
        self.training: StepwiseTraining | None = None
        self.settings: Settings = {}
        self.start_from: str | None = None
        self.course_before: dict[str, Any] = {}
        plan_reference = ray.put(self.shared.plan) if self.shared.plan.workers > 1 else None
        self.group = TrialGroup.start(self.shared.plan, plan_reference, self.shared.state_path.rpartition("/")[0])
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the running trial and accept another one, or the same again. Returns False if new workers are needed."""
        assert self.group is not None
        if not self.group.stop():
            raise LostWorkersError("the workers of the previous trial did not return")
        self._take(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation or the end."""
        assert self.group is not None
        if self.training is None:
            self.training = self.group.begin(self.settings, pauses=self.shared.pauses, start_from=self.start_from)
        # a LostWorkersError propagates from here, so that Tune ends this process and its workers
        return self._result(self.group.advance())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the state of the trial, which is paused after an evaluation."""
        folder, course = self.start_from, self.course_before
        if self.training is not None:
            folder = f"{self.shared.state_path}/{self.number:05d}-{secrets.token_hex(4)}"
            self.training.save(folder)
            course = {"evaluation": self.evaluation}
        write_whole(Path(checkpoint_dir, STATE_FILE), json.dumps({"folder": folder, "course": course}))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Start from a saved state, possibly another trial's, with this trial's settings."""
        state = json.loads(Path(checkpoint, STATE_FILE).read_text())
        self.start_from, self.course_before = state["folder"], state["course"]
        self.evaluation = int(self.course_before.get("evaluation", 0))

    def cleanup(self) -> None:
        """Stop training and end the workers; Tune calls it when this process ends."""
        if self.group is not None:
            self.group.stop()
            self.group.close()

    def _take(self, config: dict[str, Any]) -> None:
        self.number = int(config[NUMBER])
        self.settings = (
            json.loads(config[SETTINGS]) if SETTINGS in config else dict(self.shared.plan.candidates[self.number])
        )
        if RATE in config:
            self.settings[LEARNING_RATE] = config[RATE]
        self.training, self.start_from, self.course_before = None, None, {}
        self.evaluation = 0
        self.began_at = time.time()

    def _result(self, happened: Paused | Ended) -> dict[str, Any]:
        assert self.training is not None
        training, plan = self.training, self.shared.plan
        course, status, error = training.course, "", ""
        if isinstance(happened, Ended):
            status, error = _status(happened, plan, course.metrics)
        elif plan.metric not in course.metrics:  # later evaluations would not have it either
            status, error = "failed", _unknown_metric(plan, course.metrics)
        points = [(samples, seconds, metrics.get(plan.metric), at) for samples, seconds, metrics, at in training.curve]
        self.evaluation += len(points)
        training.curve.clear()
        detail = {
            "points": points,
            "samples_per_s": course.samples_per_s,
            "settings": self.settings,
            "error": error,
            "noise_scale": course.more.get(names.NOISE_SCALE.name),
            "began_at": self.began_at,
            "now": time.time(),
        }
        if isinstance(happened, Ended) and happened.summary is not None:
            detail |= _noise_of(happened.summary.noise)
        value = course.metrics.get(plan.metric, math.nan) if not error else math.nan
        return {
            VALUE: value,
            SAMPLES: course.samples,
            SECONDS: course.seconds,
            EVALUATION: self.evaluation,
            "done": bool(status),
            STATUS: status,
            DETAIL: detail,
        }


def _status(ended: Ended, plan: SweepPlan, metrics: dict[str, float]) -> tuple[str, str]:
    if isinstance(ended.error, NonFiniteLossError):
        return "diverged", str(ended.error)
    if ended.error is not None:
        return "failed", str(ended.error) or type(ended.error).__name__
    verdict = ended.summary.verdict if ended.summary is not None else ""
    if verdict.startswith("stopped"):
        return "diverged", verdict.partition(": ")[2] or verdict
    if plan.metric not in metrics:
        return "failed", _unknown_metric(plan, metrics)
    if verdict.startswith("target reached"):
        return "target reached", ""
    return ("finished" if plan.base.stop.at is None else "target missed"), ""


def _noise_of(noise: dict[str, Any]) -> dict[str, Any]:
    """Noise scale of the whole training, if it was long enough to measure it; None means infinite."""
    if noise.get("effective") is None:
        return {}
    value, low, high = (noise[key] for key in ("effective", "effective_low", "effective_high"))
    bounds = (low, high if math.isfinite(high) else None) if math.isfinite(low) else None
    return {"noise_scale": value if math.isfinite(value) else None, "noise_interval": bounds}


def _unknown_metric(plan: SweepPlan, metrics: dict[str, float]) -> str:
    return f"--metric is {plan.metric!r}, but evaluations measure {', '.join(sorted(metrics)) or 'nothing'}"
