"""The job that the driver sends to every worker, with all decisions already made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.callbacks import callbacks_of
from scaleray.config import Duration, RunConfig
from scaleray.config.checkpoint import NOTHING_SAVED
from scaleray.config.parallel import Degrees
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import Recipe
from scaleray.data import TRAIN, Split, StepPlan
from scaleray.data.iterable import promise
from scaleray.data.length_order import LengthPlan
from scaleray.data.sample_order import Origin
from scaleray.data.split_facts import COLLATE_ADVICE
from scaleray.errors import ConfigError, DataError
from scaleray.records.worker_requests import TraceRequest


def check_row_lengths(config: RunConfig, train: Split) -> None:
    """Raise ConfigError for settings that cannot be combined with ordering rows by length or with batches of tokens."""
    is_packed = train.size.packed_steps(config) is not None
    bucket = config.data.bucket_by_length
    if bucket is None and not is_packed:
        return
    key, value = ("batch.unit", "tokens") if is_packed else ("data.bucket_by_length", bucket)
    if train.is_streamed:
        allowed = "a streamed data set has an order of its own"
        raise ConfigError(key, value, allowed, "use data that can be read by index")
    if train.lengths is None:
        raise ConfigError(
            key,
            value,
            "it needs the lengths of the training rows, which are unknown",
            "give rows of unequal length as lists of arrays, a Dataset with an attribute `lengths`, or "
            "ParquetSource(lengths=...)",
        )
    if bucket is not None and not config.data.shuffle:
        allowed = "it needs shuffled rows, and data.shuffle is false"
        raise ConfigError("data.bucket_by_length", bucket, allowed, "leave one of the two settings out")
    if config.scale.is_elastic:
        raise ConfigError(
            key,
            value,
            f"scale.workers is {config.scale.workers!s}, but the order by length depends on the global batch",
            "give one number of workers",
        )
    if not is_packed:
        return
    if config.shares.by != "equal":
        raise ConfigError(
            "shares.by", config.shares.by, "with batch.unit tokens, steps differ in rows", "use equal shares"
        )
    if config.has_stages:
        raise ConfigError(
            "batch.unit",
            "tokens",
            "pipeline needs the same micro-batches in every step, but steps of tokens differ in rows",
            "count in samples, or use ddp, fsdp or zero1",
        )
    memory = config.memory
    if config.batch.micro_size is not None and (memory.find_micro_size or memory.on_out_of_memory == "halve"):
        key, value = "memory.find_micro_size", True
        if not memory.find_micro_size:
            key, value = "memory.on_out_of_memory", memory.on_out_of_memory
        raise ConfigError(
            key,
            value,
            "batch.micro_size counts tokens here, but the search tries numbers of rows",
            f"leave out batch.micro_size, which divides a worker's share by rows, or leave out {key}",
        )
    if config.batch.drop_last:
        raise ConfigError(
            "batch.drop_last",
            True,
            "with batch.unit tokens there is no partial batch to drop, because all steps have about the same size",
            "leave it out",
        )


def check_same_place(config: RunConfig, plan: StepPlan, progress: Mapping[str, Any], global_batch_size: int) -> None:
    """Raise ConfigError if a resumed run's plan by length differs from the plan before its interruption."""
    if not isinstance(plan, LengthPlan):
        return
    where = progress["epoch"], progress["sample_in_epoch"]
    if progress["global_batch_size"] != global_batch_size or plan.place(progress["step"]) != where:
        raise ConfigError(
            "batch.global_size",
            config.batch.global_size,
            "a run that orders or packs its rows by length must keep its original batches",
            "resume with the same size, or start a new run from its weights: --workload.weights RUN_FOLDER",
        )


MANY_EPOCHS = 200
"""Number of epochs of a Ray Dataset after which a Ray node's metrics page may be too long for Prometheus. It has four
histograms for every epoch (measured: 44 to 83 kB per epoch, and 11 ms on idle cores; ray-project/ray#65029)."""


WITHOUT_FILES: Mapping[str, Any] = {**NOTHING_SAVED, "tracking.system_metrics": False}
"""Settings of a training that is only measured or compared: no checkpoints, and no monitoring of the node."""
FIRST_STEPS: Mapping[str, Any] = {
    **WITHOUT_FILES,
    "stop.at": None,
    "stop.patience": None,
    "stop.watch": None,
    "evaluation.every": None,
}
"""Settings for running only the first steps of a training, without early stopping or interruption."""


@dataclass(frozen=True)
class TrainJob:
    """One training, ready to run anywhere. started_at: wall clock, in seconds, at which the command started."""

    config: RunConfig
    recipe: Recipe
    workload: Any
    splits: Mapping[str, Split]
    started_at: float
    workers: int = 0
    """Number of workers that train; 0 for the number in the config."""
    origin: Origin | None = None
    """Position at which the plan begins, if the global batch size has changed."""
    varied: tuple[str, ...] = ()
    """Keys of the config in which the trainings of a sweep differ."""
    start_ends: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock time at the end of each part of the start-up, see `records/start.py`."""
    trace: TraceRequest | None = None
    """Trace of the last steps, if one is requested."""
    is_only_measured: bool = False
    """Whether its steps or evaluations are only measured or compared, as parts of a training."""
    probes_links: bool = False
    """Whether the link between each pair of workers is measured at the end of the training."""
    mlflow_runs: tuple[str, ...] | None = None
    """IDs of the runs of MLflow's library from before the workload was loaded; None if unknown."""

    def __post_init__(self) -> None:
        by, train = self.config.shares.by, self.splits[TRAIN]
        if by != "equal" and (train.is_streamed or train.dealt_by):
            raise ConfigError(
                "shares.by",
                by,
                f"{'a Ray ' if train.is_streamed else 'this Iterable'}Dataset deals its rows out in equal shares",
                "use equal shares, or data that can be read by index",
            )
        if train.dealt_by and self.config.scale.is_elastic:
            raise ConfigError(
                "scale.workers",
                str(self.config.scale.workers),
                f"this IterableDataset deals its rows out by {train.dealt_by}, for a fixed number of workers",
                "give one number, or let every worker read all rows, of which it then uses its own",
            )
        if self.config.recovery.is_on:
            self._check_recovery(train)
        check_row_lengths(self.config, self.splits[TRAIN])
        for split in self.splits.values():
            if self.config.deterministic and not split.row_values.are_repeatable:
                raise DataError.problem(
                    f"the {split.name} data",
                    f"is not repeatable, which deterministic requires: {split.row_values.difference}",
                    f"{split.row_values.advice}, or train without --deterministic",
                )

    def _check_recovery(self, train: Split) -> None:
        """Check that a spare can read the rows of any worker, and that no state exists on one worker only."""
        own_state = [each for each in callbacks_of(self.workload) if callable(getattr(each, "state_dict", None))]
        why = ""
        if train.is_streamed or train.dealt_by:
            why = f"{'a Ray ' if train.is_streamed else 'this Iterable'}Dataset deals its rows out to the workers"
        elif own_state:
            why = f"{type(own_state[0]).__name__} has separate state on each worker, which is lost with the worker"
        if why:
            raise ConfigError("recovery.spares", self.config.recovery.spares, why, "leave it out")

    @property
    def sample_order(self) -> str:
        """The guaranteed order of the training data, as text."""
        promise, values = self.train_plan().promise, self.splits[TRAIN].row_values
        return f"{promise}; {'but ' if values.difference else ''}{values.promise}" if values.promise else promise

    def data_warnings(self) -> list[str]:
        """Warnings about data that is not repeatable, batches that cannot be prepared in advance, and a Ray Dataset
        that is read so often that Ray has too many metrics for it."""
        found = []
        for split in self.splits.values():
            if not split.row_values.are_repeatable:
                found.append(f"the {split.name} data: {split.row_values.promise}; {split.row_values.advice}")
            elif split.collate is not None and split.collate.why_in_turn and not split.is_streamed:
                why = f"{split.collate.why_in_turn}, so the training waits while each batch is made"
                found.append(f"the {split.name} data: {why}; {COLLATE_ADVICE}")
        if self.splits[TRAIN].is_streamed and self.config.monitoring.port is None:
            epochs = self.train_plan().place(self.recipe.total_steps - 1)[0] + 1
            if epochs > MANY_EPOCHS:
                found.append(
                    f"the train data: a Ray Dataset that is read {epochs} times; a Ray node adds metrics each time "
                    "until its page is too long for Prometheus (ray-project/ray#65029); set monitoring.port and let "
                    "Prometheus scrape that port, or repeat the rows within the Dataset"
                )
        return found

    @property
    def world_size(self) -> int:
        """Number of workers that train."""
        return self.workers or self.config.scale.max_workers

    @property
    def degrees(self) -> Degrees:
        """Numbers of workers along each axis."""
        return self.recipe.degrees

    @property
    def data_parallel_size(self) -> int:
        """Number of shares into which a global batch is divided."""
        return self.degrees.data

    def on(self, workers: int) -> TrainJob:
        """The same training on the number of workers that an elastic run currently has."""
        if workers == self.world_size:
            return self
        config = self.config
        if config.scale.on_resize == "rescale":
            config = rescaled(config, self.recipe, workers)
        return self.changed(recipe=derive(config, self.splits[TRAIN].size, workers=workers), workers=workers)

    def changed(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        first_steps: int | None = None,
        values: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> TrainJob:
        """The same training with other settings (see `RunConfig.changed`), values of its recipe, and fields.

        first_steps: train this many steps, even beyond the end of the training, without target, patience, evaluations
        or files."""
        if first_steps is not None:
            settings = {**FIRST_STEPS, "schedule.watch": self.config.followed, **(settings or {})}
            no_files = dict.fromkeys(("checkpoint_every_steps", "keep_checkpoint_every_steps", "memory_every_steps"))
            values = {"total_steps": first_steps, "evaluate_every_steps": None, **no_files, **(values or {})}
            fields = {"splits": {TRAIN: self.splits[TRAIN]}, "is_only_measured": True, **fields}
        if settings:
            fields["config"] = self.config.changed(settings)
        if values:
            fields["recipe"] = dataclasses.replace(self.recipe, **values)
        return dataclasses.replace(self, **fields)

    def continued(self, progress: Mapping[str, Any]) -> TrainJob:
        """The rest of a training after a checkpoint's progress, possibly made with another global batch size."""
        check_same_place(self.config, self.train_plan(), progress, self.recipe.global_batch_size)
        origin = Origin(**progress["origin"]) if progress.get("origin") else None
        if progress["global_batch_size"] != self.recipe.global_batch_size:
            origin = Origin(progress["step"], progress["epoch"], progress["sample_in_epoch"])
        if origin is None:
            return self
        job = self.changed(origin=origin)
        return job.changed(values={"total_steps": origin.step + self.recipe.total_steps - job.steps_before()})

    def steps_before(self) -> int:
        """Number of steps of the current size that correspond to the training before the origin."""
        if self.origin is None:
            return 0
        plan = self.train_plan()
        return (self.origin.epoch + 1) * plan.steps_per_epoch - plan.steps_to_epoch_end

    def train_plan(self) -> StepPlan:
        """The order of the training samples."""
        split, config = self.splits[TRAIN], self.config
        is_packed = split.size.packed_steps(config) is not None
        by_length: dict[str, Any] = {}
        if split.lengths is not None and (is_packed or config.data.bucket_by_length is not None):
            by_length = {
                "lengths": split.lengths,
                "bucket_batches": config.data.bucket_by_length,
                "tokens_per_step": config.batch.global_size if is_packed else None,
                "tokens_per_micro_batch": config.batch.micro_size if is_packed else None,
            }
        dealt_by = split.dealt_by if self.data_parallel_size > 1 else ""
        order = promise(config.data.shuffle, config.data.window_rows, dealt_by=dealt_by)
        return (LengthPlan if by_length else StepPlan)(
            **by_length,
            num_samples=self._usable_rows(split, is_dealt=bool(dealt_by)),
            global_batch_size=self.recipe.global_batch_size,
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
            drop_last=self.config.batch.drop_last,
            group_sizes=split.group_sizes,
            window_rows=self.config.data.window_rows,
            is_streamed=split.is_streamed,
            given_order=order if split.is_sequential else "",
            is_dealt=bool(dealt_by),
            origin=self.origin,
        )

    def evaluation_plan(self, split: Split) -> StepPlan:
        """Every row of an evaluation split once, in file order. Each evaluation uses epoch 0, so that random transforms
        give the same values each time and metrics depend only on the weights."""
        batch_size = self.recipe.evaluation_micro_batch_size * self.data_parallel_size
        rows = self._usable_rows(split)
        return StepPlan(
            rows, min(batch_size, rows), self.config.seed, shuffle=False, is_streamed=split.is_streamed, name=split.name
        )

    def evaluation_splits(self) -> list[Split]:
        """Every split except `train`."""
        return [split for name, split in self.splits.items() if name != TRAIN]

    def _usable_rows(self, split: Split, *, is_dealt: bool = False) -> int:
        # what is streamed or dealt out gives every worker the same number of rows, and leaves out the rest
        workers = self.data_parallel_size
        return split.num_rows // workers * workers if split.is_streamed or is_dealt else split.num_rows


def rescaled(config: RunConfig, full: Recipe, workers: int) -> RunConfig:
    """Config in which each of fewer workers keeps its share: the global batch is smaller, the total of samples equal.

    The learning rate follows from `optimizer.rule`. Lengths in steps refer to the full batch."""

    def in_epochs(duration: Duration | None) -> Duration | None:
        if duration is None or duration.unit != "steps":
            return duration
        return Duration(duration.value / full.steps_per_epoch, "epochs")

    share = config.batch.global_size // config.scale.max_workers
    warmup = config.schedule.warmup
    if warmup.unit == "steps":  # stays in steps, which no rule stretches
        warmup = Duration(round(warmup.value * config.scale.max_workers / workers), "steps")
    return config.changed(
        {
            "batch.global_size": share * workers,
            "stop.after": in_epochs(config.stop.after),
            "schedule.warmup": warmup,
            "schedule.length": in_epochs(config.schedule.length),
        }
    )
