"""Stand-in for a module's Trainer, which reports the training's progress and raises an error for anything else."""

import math
import os
import traceback
from typing import Any

import torch.distributed as dist

from scaleray.errors import WorkloadError
from scaleray.workload import user_frames

KNOWN = (
    "global_step", "current_epoch", "estimated_stepping_batches", "num_training_batches", "max_steps", "max_epochs",
    "global_rank", "local_rank", "world_size", "is_global_zero", "training", "validating",
    "testing", "predicting", "sanity_checking", "optimizers", "lr_scheduler_configs", "logger", "loggers",
    "callback_metrics", "callbacks", "lightning_module", "should_stop",
)  # fmt: skip


class TrainerStandIn:
    """Stand-in for Lightning's Trainer, attached to each module while scaleray trains it.

    place: rank and number of workers; None for those of the process group. total_steps and steps_per_epoch are None
    until the recipe is known; they stay None in a process that does not train. looks_back: whether the last step still
    counts as the current one, as in hooks after it. should_stop: whether the user's code requests the end of the
    training."""

    logger = None
    loggers: tuple[Any, ...] = ()
    sanity_checking = predicting = False
    progress_bar_callback = None  # self.print() asks for it
    profiler = None

    def __init__(self) -> None:
        self.global_step = 0
        self.place: tuple[int, int] | None = None
        self.stage = "training"
        self.looks_back = False
        self.total_steps: int | None = None
        self.steps_per_epoch: int | None = None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.callbacks: list[Any] = []
        self.lightning_module: Any = None
        self.should_stop = False

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, from 0."""
        return max(0, self.global_step - self.looks_back) // (self.steps_per_epoch or 1)

    @property
    def batch_idx(self) -> int:
        """Index of the step in its epoch, from 0."""
        return self.global_step % (self.steps_per_epoch or 1)

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole training."""
        return self._needs_recipe("estimated_stepping_batches", self.total_steps)

    max_steps = property(lambda self: self._needs_recipe("max_steps", self.total_steps))

    @property
    def num_training_batches(self) -> int:
        """Optimizer steps of an epoch."""
        return self._needs_recipe("num_training_batches", self.steps_per_epoch)

    @property
    def max_epochs(self) -> int:
        """Epochs of the whole training; the last one may be partial."""
        steps = self._needs_recipe("max_epochs", self.total_steps)
        return math.ceil(steps / self._needs_recipe("max_epochs", self.steps_per_epoch))

    training = property(lambda self: self.stage == "training")
    validating = property(lambda self: self.stage == "validating")
    testing = property(lambda self: self.stage == "testing")
    evaluating = property(lambda self: self.stage in ("validating", "testing"))
    local_rank = property(lambda self: int(os.environ.get("LOCAL_RANK", self.global_rank)))
    global_rank = property(lambda self: self._place()[0])
    world_size = property(lambda self: self._place()[1])
    is_global_zero = property(lambda self: self.global_rank == 0)

    def _place(self) -> tuple[int, int]:
        return self.place or ((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1))

    def _needs_recipe(self, name: str, value: int | None) -> int:
        if value is None:
            raise refused(f"self.trainer.{name}", "the length of the training depends on the data and is not yet known")
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        raise refused(
            f"self.trainer.{name}", f"scaleray trains in place of the Trainer, and supports: {', '.join(KNOWN)}"
        )


def refused(what: str, allowed: str, hint: str = "") -> WorkloadError:
    """Error for an unsupported use of Lightning, with the line of the user's code."""
    frames = user_frames(traceback.extract_stack())
    where = f"used in {frames[-1].filename}:{frames[-1].lineno}" if frames else "used"
    advice = hint or f"omit `{frames[-1].line}`, or guard it" if frames and frames[-1].line else hint
    return WorkloadError(what, where, allowed, advice)
