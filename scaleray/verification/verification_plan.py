"""Variants of a training to verify: strategies x numbers of workers x accumulation, where possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.compression import CompressionSettings
from scaleray.config.parallel import Degrees, ParallelSettings, all_degrees, short_form
from scaleray.config.recipe.combinations import check_schedule
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize, Recipe, largest_divisor, with_micro_size
from scaleray.data import TRAIN, Split
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, DataError, first_line
from scaleray.records.certificate import Outcome
from scaleray.records.start import steady_time
from scaleray.strategies import STRATEGIES
from scaleray.training.setup.job import TrainJob
from scaleray.verification.repeatable.repeatable_workload import Partition
from scaleray.verification.runs.compared_job import (
    Rows,
    first_rows,
    later_batch_size,
    rows_of_epoch,
    short_job,
    with_rows,
)
from scaleray.verification.runs.compared_runs import Variant
from scaleray.verification.verify_options import VerifyOptions

CPUS_PER_WORKER = 0.25
"""CPUs of a worker. Since numbers and not speeds are compared, workers may share a core to fit on a small machine."""


@dataclass(frozen=True)
class Plan:
    """The variants of a verification.

    groups: variants by number of workers; the first group holds the reference. refused: variants that do not run, with
    the reason.
    """

    reference: Variant
    groups: Mapping[int, list[Variant]]
    refused: list[Outcome]


def make_plan(config: RunConfig, options: VerifyOptions, workload: Any, sources: Mapping[str, Source]) -> Plan:
    """Plan the requested variants that the config and the strategies allow, and list the others with reasons.

    Raises UsageError."""
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    # rows that are dealt out are other ones on another number of workers: here every worker reads all and keeps its own
    splits[TRAIN] = dataclasses.replace(splits[TRAIN], dealt_by="")
    _check_comparable(splits[TRAIN])
    size = splits[TRAIN].size
    batch_size = derive(on_workers(config, "auto", 1), size).global_batch_size
    later_config, later_size = _later_training(config, options, size, batch_size)
    rows = rows_of_epoch(
        size.num_samples,
        batch_size=batch_size,
        later_batch_size=later_size,
        steps=options.compared_steps,
        partitions=[
            Partition(world_size, -(-total // world_size // pieces))
            for total in (batch_size, later_size)
            for world_size in options.sizes
            for pieces in options.pieces
        ],
        drop_last=config.batch.drop_last,
    )
    trainings = _Trainings(config, later_config, options, workload, splits, size, rows, batch_size)
    groups, refused = _groups(options, trainings)
    try:
        reference = trainings.variant(Spread("auto"), 1, min(options.pieces))
    except ConfigError:
        reference = trainings.variant(Spread("auto"), 1, 1)
    return Plan(reference, groups, refused)


def _check_comparable(train: Split) -> None:
    """Raise DataError if rows or values depend on the number of workers or change when read again."""
    if train.is_streamed:
        raise DataError(
            "the train data",
            "a Ray Dataset",
            "its order depends on the number of workers, so runs cannot be compared",
            "verify with rows that can be read by index: arrays, ParquetSource, TokenSource or a torch Dataset",
        )
    if not train.row_values.are_repeatable:
        raise DataError.problem(
            "the train data",
            f"is not repeatable: {train.row_values.difference}. Runs can be compared only on the same values",
            train.row_values.advice,
        )


def _later_training(
    config: RunConfig, options: VerifyOptions, size: DataSize, batch_size: int
) -> tuple[RunConfig, int]:
    """Config and global batch size of the steps after the resume, another size if the training allows it."""
    if config.data.bucket_by_length is not None or size.packed_steps(config) is not None:
        return config, batch_size  # which rows share a batch follows from its size
    world_sizes = options.sizes
    later_size = later_batch_size(
        batch_size, size.num_samples, world_sizes=world_sizes, accumulation=max(options.pieces)
    )
    later_config = config.changed({"batch.global_size": config.batch.global_size // batch_size * later_size})
    try:
        derive(on_workers(later_config, "auto", 1), size)
    except ConfigError:  # this training has no other batch size
        return config, batch_size
    return later_config, later_size


@dataclass(frozen=True)
class _Trainings:
    """The training to verify, to be spread over workers in various ways. later_config: config after the resume."""

    config: RunConfig
    later_config: RunConfig
    options: VerifyOptions
    workload: Any
    splits: Mapping[str, Split]
    size: DataSize
    rows: Rows
    batch_size: int

    def variant(self, spread: Spread, world_size: int, accumulation: int) -> Variant:
        """The training, spread over workers in this way. Raises ConfigError if that is impossible."""
        first = self._job(self.config, spread, world_size, accumulation)
        own = with_rows(short_job(first, steps=self.options.compared_steps), self.rows.epoch)
        later = None
        if first.recipe.total_steps > 1 and self.options.compared_steps > 1:
            later = self._compared(self._job(self.later_config, spread, world_size, accumulation, at_most=True))
        return Variant(
            first.recipe.strategy,
            world_size,
            first.recipe.accumulation_steps,
            self._compared(first),
            own,
            later,
            first_rows(self.splits[TRAIN], self.rows.with_statistics),
        )

    def _job(
        self, config: RunConfig, spread: Spread, world_size: int, accumulation: int, *, at_most: bool = False
    ) -> TrainJob:
        there = spread.on(config, world_size)
        recipe = _recipe(there, self.size, accumulation, at_most=at_most)
        # explicit, as if a file said so: what is resumed is compared with it
        a_sample = self.size.tokens_per_sample or 1 if there.batch.unit == "tokens" else 1
        # steps that are packed with tokens are cut by rows here, into so many parts
        is_packed = self.size.packed_steps(there) is not None
        there = there.changed({"batch.micro_size": None if is_packed else recipe.micro_batch_size * a_sample})
        return TrainJob(there, recipe, self.workload, self.splits, steady_time())

    def _compared(self, job: TrainJob) -> TrainJob:
        """The first steps of the job, which are compared."""
        short = short_job(job, steps=self.options.compared_steps, precision=self.options.precision)
        # so few that a worker has a row less than another, and the last batch of some none
        return with_rows(short.changed(splits=self.splits), self.rows.epoch, evaluated=self.batch_size + 3)


def _groups(options: VerifyOptions, trainings: _Trainings) -> tuple[dict[int, list[Variant]], list[Outcome]]:
    """Variants by number of workers, and refused variants. Raises ConfigError if none remain."""
    groups: dict[int, list[Variant]] = {1: []}  # the reference runs there, even if nothing else does
    refused: dict[tuple[str, int, str], Outcome] = {}
    first_error: ConfigError | None = None
    for world_size in options.sizes:
        if trainings.size.packed_steps(trainings.config) is None:
            _check_world_size(world_size, trainings.batch_size)
        found: dict[tuple[str, str, int], Variant] = {}
        for spread in _spreads(options, trainings.config, world_size):
            for accumulation in options.pieces:
                try:
                    made = trainings.variant(spread, world_size, accumulation)
                    found.setdefault((made.strategy, made.outcome.layout, made.accumulation), made)
                except ConfigError as exc:
                    first_error = first_error or exc
                    reason = first_line(exc).removesuffix(".")
                    refused[f"{spread}", world_size, reason] = Outcome(
                        spread.strategy, world_size, accumulation, "refused", reason, layout=spread.layout
                    )
        if found:
            groups[world_size] = list(found.values())
    if first_error is not None and not any(groups.values()):
        raise first_error
    return groups, list(refused.values())


def _spreads(options: VerifyOptions, config: RunConfig, world_size: int) -> list[Spread]:
    """The requested ways of spreading the training over this many workers."""
    if options.layouts == "all":
        return [Spread(short_form(asdict(d)) or "ddp", d) for d in all_degrees(world_size)] if world_size > 1 else []
    named = dict.fromkeys(config.strategy.name if name == "own" else name for name in strategy_names(options))
    asked = list(STRATEGIES) if "all" in named else list(named)
    # `single` is for one worker, which need not be said when others were asked for too
    return [Spread(s) for s in asked if s != "single" or world_size == 1 or len(asked) == 1]


def strategy_names(options: VerifyOptions) -> list[str]:
    """Names of strategies, possibly including `own` and `all`. Raises ConfigError for an unknown one."""
    for name in options.names:
        if name not in (*STRATEGIES, "all", "own"):
            raise ConfigError("--strategies", name, f"it must be one of all, {', '.join(STRATEGIES)} or own")
    return options.names


def default_world_sizes(config: RunConfig) -> tuple[int, ...]:
    """Numbers of workers to compare by default: one, and the smallest above one that the config allows."""
    return 1, max(2, config.parallel.least_workers(config.strategy.name))


def course(plan: Plan) -> dict[str, int]:
    """Events within the compared steps, as numbers by name."""
    variant = plan.reference
    found = {
        "rows_of_epoch": variant.job.splits[TRAIN].num_rows,
        "global_batch_size": variant.job.recipe.global_batch_size,
    }
    if variant.later is not None and variant.resumes_after is not None:
        found |= {
            "resumed_after": variant.resumes_after,
            "later_global_batch_size": variant.later.recipe.global_batch_size,
        }
    return found | {f"{split.name}_rows": split.num_rows for split in variant.job.evaluation_splits()}


def events_text(plan: Plan) -> str:
    """Sentence on the events within the compared steps."""
    facts = course(plan)
    words = [f"epochs of {facts['rows_of_epoch']} rows"]
    if "resumed_after" in facts:
        words.append(
            f"after step {facts['resumed_after']} a resume from one worker "
            f"with batches of {facts['later_global_batch_size']}"
        )
    if any(name.endswith("_rows") for name in facts):
        words.append("evaluations before it and at the end" if "resumed_after" in facts else "an evaluation at the end")
    return ", ".join(words)


def _check_world_size(world_size: int, batch_size: int) -> None:
    if batch_size % world_size == 0:
        return
    below = next(n for n in range(min(world_size, batch_size), 0, -1) if batch_size % n == 0)
    above = next((n for n in range(world_size, min(batch_size, 10**6) + 1) if batch_size % n == 0), batch_size)
    near = " or ".join(str(n) for n in sorted({below, above}))
    raise ConfigError(
        "--world-sizes", world_size, f"it must divide the global batch of {batch_size} samples", f"nearest: {near}"
    )


def _recipe(config: RunConfig, size: DataSize, accumulation: int, *, at_most: bool) -> Recipe:
    """The recipe with this number of micro-batches in each worker's step, of which the last may be smaller.

    at_most: accept a single micro-batch although more were requested, instead of raising ConfigError."""
    recipe = derive(config, size)
    share = recipe.per_worker_batch_size
    micro_size = -(-share // accumulation)
    if micro_size == share:
        if accumulation > 1 and not at_most:
            raise ConfigError("--accumulation", accumulation, f"each worker has only {share} sample in a step")
        return recipe
    # what a config refuses, it refuses for any number of micro-batches above one
    divisor = (largest_divisor(share, at_most=micro_size) or 1) * (config.batch.global_size // recipe.global_batch_size)
    if size.packed_steps(config) is None:
        derive(config.changed({"batch.micro_size": divisor}), size)
    if recipe.degrees.pipeline > 1:
        check_schedule(config, -(-share // micro_size))
    return with_micro_size(recipe, micro_size, why=f"at most {accumulation} micro-batches in each step")


@dataclass(frozen=True)
class Spread:
    """A way of spreading a training over workers. degrees: None for those of the config, or the strategy's own."""

    strategy: str
    degrees: Degrees | None = None

    @property
    def layout(self) -> str:
        """The given degrees as text, if any."""
        return self.degrees.text() if self.degrees else ""

    def on(self, config: RunConfig, world_size: int) -> RunConfig:
        """The training's config on this many workers."""
        there = on_workers(config, self.strategy, world_size)
        return there.changed({"parallel": ParallelSettings(**asdict(self.degrees))}) if self.degrees else there


def on_workers(config: RunConfig, strategy: str, world_size: int) -> RunConfig:
    """The config of the training on other workers."""
    settings: dict[str, Any] = {
        "scale.workers": world_size,
        "scale.cpus_per_worker": min(CPUS_PER_WORKER, config.scale.cpus_per_worker),
        "scale.max_failures": 0,
        "parallel": config.parallel if strategy == config.strategy.name else config.parallel.within(strategy),
        "strategy.name": strategy,  # not checked: one of the table need not be one that a config file may name
        "batch.micro_size": None,
    }
    if config.shares.by != "equal":  # measured shares would hardly differ here, and not twice in the same way
        speeds = tuple(1 + rank / max(1, world_size - 1) for rank in range(world_size))
        settings |= {"shares.by": "given", "shares.speeds": speeds}
    if world_size == 1:
        settings["compression"] = CompressionSettings()  # one process sends nothing
    return config.changed(settings)
