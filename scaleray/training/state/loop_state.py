"""State of the loop between two steps, and its part of a checkpoint, next to the model and its optimizer."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaleray.records.run_record import StepRecord
from scaleray.training.health.clock import Clock
from scaleray.training.noise.noise_watch import NoiseWatch
from scaleray.training.setup.job import TrainJob
from scaleray.training.step.evaluation import Evaluations
from scaleray.training.step.micro_sizes import MicroSizes
from scaleray.training.step.nonfinite import RowInspector, stops_at, verdict_of
from scaleray.training.step.several_losses import OptimizerStep
from scaleray.training.step.worker_shares import WorkerShares


@dataclass
class LoopState:
    """State of the loop between two steps."""

    job: TrainJob
    """The training. Its recipe uses smaller micro-batches once memory requires it."""
    step: int
    """Number of the last step, counted from 1; 0 before the first one."""
    nonfinite_steps: int = 0
    verdict: str | None = None
    """Reason why the training stopped for good before its planned end."""

    def ends_with(self, taken: StepRecord, inspect: RowInspector) -> bool:
        """Count non-finite steps, and return whether the training ends with this step; if so, a verdict is set.
        inspect: describes the rows of a step that ends the training. Raises NonFiniteLossError if the training fails.
        """
        self.nonfinite_steps += taken.nonfinite_steps
        if not taken.nonfinite_steps or not stops_at(taken, self.job.config.on_nonfinite, inspect):
            return False
        self.step, self.verdict = taken.step, verdict_of(taken, inspect)
        return True


@dataclass(frozen=True)
class LoopCheckpoint:
    """The loop's part of a checkpoint: its progress, and the state of its parts."""

    loop: LoopState
    train_step: OptimizerStep
    evaluations: Evaluations
    clock: Clock
    noise: NoiseWatch
    shares: WorkerShares
    micro_sizes: MicroSizes

    def values(self) -> dict[str, Any]:
        """Current state, as JSON."""
        job = self.loop.job
        epoch, sample = job.train_plan().place(self.loop.step)
        return {
            "step": self.loop.step,
            "epoch": epoch,
            "sample_in_epoch": sample,
            "global_batch_size": job.recipe.global_batch_size,
            "origin": dataclasses.asdict(job.origin) if job.origin else None,
            "count_per_row": self.train_step.count_per_row,
            "nonfinite_steps": self.loop.nonfinite_steps,
            "nonfinite_in_a_row": self.train_step.nonfinite_in_a_row,
            "metrics": self.evaluations.metrics,
            "evaluated_at": self.evaluations.step,
            "best": self.evaluations.best.state(),
            "verdict": self.loop.verdict,
            "noise_scale": self.noise.state(),
            "training_time_s": self.clock.total_s,
            "shares": self.shares.state(),
            "micro_batch_size": self.micro_sizes.now,
        }

    def restore(self, before: dict[str, Any]) -> None:
        """Continue from `before`, the values of a checkpoint. The job and the shares in it are not restored here: the
        loop is created with them."""
        self.loop.step = self.train_step.num_updates = before["step"]
        self.train_step.count_per_row = before["count_per_row"]
        self.train_step.nonfinite_in_a_row = before.get("nonfinite_in_a_row", 0)
        self.loop.nonfinite_steps = before["nonfinite_steps"]
        self.evaluations.step = before["evaluated_at"]
        self.evaluations.metrics = dict(before["metrics"])
        self.evaluations.best.load_state(before.get("best"))
        self.loop.verdict = before.get("verdict")
        self.clock.total_s = before.get("training_time_s", 0.0)
        self.micro_sizes.now = before.get("micro_batch_size")
        self.noise.kept = before.get("noise_scale")
