"""The jobs that verify compares: a few steps of a training that include ends of epochs, evaluations and a resume.

The functions are pure, so that every worker and the single process derive the same jobs."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.config.recipe.lr_rules import learning_rate_factor
from scaleray.data import TRAIN, Split
from scaleray.data.length_order import Lengths
from scaleray.training.setup.job import TrainJob
from scaleray.verification.repeatable.repeatable_workload import Partition

OWN_STEPS = 5
"""Number of steps in the run's own precision. All start from the same parameters, so a few suffice to show rounding."""


def short_job(job: TrainJob, *, steps: int, precision: str | None = None) -> TrainJob:
    """The job of a training's first steps, which record gradient norms; derived values stay those of the full length.

    precision: number format that replaces the config's.
    """
    settings: dict[str, Any] = {"tracking.every_steps": 1}
    if precision is not None:
        # float8 is seen in the run's own precision, as bf16 is
        other = {"dtype": precision, "float8": "none", "float8_leave_out": (), "emulate_float8": False}
        settings |= {f"precision.{name}": value for name, value in other.items()}
    return job.changed(settings, first_steps=min(steps, job.recipe.total_steps))


def steps_gone_on(half: int) -> int:
    """Number of steps after the first `half` that a variant takes twice, uninterrupted and from its own checkpoint."""
    return min(3, half - 1)


def steps_before_resume(steps: int) -> int:
    """Number of compared steps after which other workers resume from the state; 0 if none do."""
    return steps // 2


@dataclass(frozen=True)
class Rows:
    """Number of training rows in an epoch of the compared steps. with_statistics: the same for a model with statistics
    over a worker's rows, which need more than one row."""

    epoch: int
    with_statistics: int


def rows_of_epoch(
    available: int,
    *,
    batch_size: int,
    later_batch_size: int,
    steps: int,
    partitions: Sequence[Partition],
    drop_last: bool = False,
) -> Rows:
    """Rows of an epoch, few enough that epochs end within the compared steps, with a last batch that workers cannot
    divide.

    With batches of `batch_size`, the last one is about half full; with later batches, it leaves a worker without rows.
    Data with too few rows are unchanged. partitions: how workers will divide batches. drop_last: partial batches are
    dropped, so an epoch has at least the rows of the larger batch."""
    full = max(1, (steps_before_resume(steps) - 1) // 3)
    rest = later_batch_size if later_batch_size < batch_size else 0
    if later_batch_size > batch_size:
        full += 1 - full % 2  # so that the last of the later batches is about half full
    least = batch_size
    if drop_last and later_batch_size > batch_size:
        least = later_batch_size
        full = max(full, -(-later_batch_size // batch_size))
    smallest = min(batch_size, later_batch_size)
    few = max(1, max(p.num_shares for p in partitions) - 1)

    def fitting(more: int) -> int:
        wanted = full * batch_size + more
        while wanted > available and wanted - batch_size >= least:
            wanted -= batch_size
        return min(wanted, available)

    # a later, larger batch ends an epoch with the rest and a whole batch before it
    before = batch_size if later_batch_size > batch_size else 0
    # one row has no statistics
    suits = (
        n
        for n in range(smallest - 1, 1, -1)
        if all(
            min(p.smallest(n), p.smallest(before + n)) > 1 and n % p.num_shares for p in partitions if p.num_shares > 1
        )
    )
    return Rows(fitting(rest + few if few < smallest else rest), fitting(next(suits, 0)))


def later_batch_size(batch_size: int, available: int, *, world_sizes: Sequence[int], accumulation: int) -> int:
    """Half the global batch if every micro-batch then has at least two rows; else twice the global batch if there are
    enough rows; else the global batch."""
    half, every = batch_size // 2, math.lcm(*world_sizes)
    if batch_size % 2 == 0 and half % every == 0 and half // max(world_sizes) >= 2 * accumulation:
        return half
    return 2 * batch_size if 2 * batch_size < available else batch_size


def with_rows(job: TrainJob, rows: int, *, evaluated: int = 0) -> TrainJob:
    """The job on the first `rows` rows of its training data. evaluated: number of first rows of every other split; 0
    removes the other splits."""
    splits = {TRAIN: first_rows(job.splits[TRAIN], rows)}
    if evaluated:
        splits.update({n: first_rows(s, evaluated) for n, s in job.splits.items() if n != TRAIN and not s.is_streamed})
    return job.changed(splits=splits)


def first_rows(split: Split, rows: int) -> Split:
    """The first rows of a split; if it has several continuous lanes, the same number of each."""
    if split.lanes is not None:
        rows = max(split.lanes, rows - rows % split.lanes)
    groups = None
    if split.group_sizes is not None:
        left, cut = rows, []
        for size in split.group_sizes:
            if left > 0:
                cut.append(min(size, left))
            left -= size
        groups = tuple(cut)
    lengths = Lengths(split.lengths.values[:rows]) if split.lengths is not None else None
    return dataclasses.replace(split, num_rows=min(rows, split.num_rows), group_sizes=groups, lengths=lengths)


def first_part(job: TrainJob, steps: int, *, goes_on_for: int = 0) -> TrainJob:
    """The job of the steps before the resume, with evaluations, a checkpoint at their end, and some steps after it."""
    # an evaluation lies among the steps, so that what it leaves behind is seen
    every = max((n for n in range(1, steps) if steps % n == 0), default=None)
    total = steps + goes_on_for
    return job.changed(values={"total_steps": total, "checkpoint_every_steps": steps, "evaluate_every_steps": every})


def later_part(job: TrainJob, earlier: TrainJob, *, first: int, last: int) -> TrainJob:
    """The job of the steps after `first` up to `last`, resumed from a checkpoint of `earlier`."""
    if job.recipe.global_batch_size == earlier.recipe.global_batch_size:
        return job.changed(values={"total_steps": last})
    # a resumed job counts its total in steps of its own size, as if the training before had been in them
    before = position_after(earlier, first, in_steps_of=job)
    return job.changed(values={"total_steps": last - first + before})


def position_after(earlier: TrainJob, step: int, *, in_steps_of: TrainJob) -> int:
    """Number of another job's steps that cover the first `step` steps: whole epochs and the remainder of the last."""
    plan, later = earlier.train_plan(), in_steps_of.train_plan()
    epoch, sample = plan.place(step)
    left, size = plan.num_samples - sample, later.global_batch_size
    return (epoch + 1) * later.steps_per_epoch - (left // size if later.drop_last else math.ceil(left / size))


@dataclass(frozen=True)
class DueRates:
    """Learning rates derived from the config alone. position: in the schedule, before step `first` + 1."""

    job: TrainJob
    first: int = 0
    position: int = 0

    def factor(self, step: int) -> float:
        """Factor of the learning rate at step `step`, counted from 1."""
        schedule, recipe = self.job.config.schedule, self.job.recipe
        return learning_rate_factor(
            self.position + step - 1 - self.first,
            name=schedule.name,
            warmup_steps=recipe.warmup_steps,
            schedule_steps=recipe.schedule_steps,
            final_ratio=schedule.final_ratio,
        )
