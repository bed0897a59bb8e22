"""Trials of a sweep, planned before anything starts: the config of each trial, and trials that cannot run."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scaleray.config import RunConfig
from scaleray.config.checkpoint import NOTHING_SAVED
from scaleray.config.loading import Entry, validate
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import nearest_multiples
from scaleray.data import TRAIN, Split, StepPlan
from scaleray.data.length_order import LengthPlan
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, DataError, ScaleRayError, UsageError
from scaleray.sweeps.search_space import (
    BATCH_SIZE,
    LEARNING_RATE,
    OPTIMIZER,
    RULE,
    SEED,
    WARMUP,
    Candidates,
    LogUniform,
    Settings,
    Space,
    choose,
)
from scaleray.sweeps.sweep_question import SweepQuestion
from scaleray.training.setup.job import TrainJob

ARGS = "workload.args"
PAUSING = ("hyperband", "pbt")
"""Schedulers that pause and resume trials."""


@dataclass(frozen=True)
class Material:
    """Workload and data that trials with the same workload arguments need.

    workload: the object, or its bytes when sent to a worker. sources: the sources themselves, or object references.
    """

    workload: Any
    splits: Mapping[str, Split]
    sources: Mapping[str, Any]


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep of a base config. materials: by the workload's arguments, as `material_key` writes them.

    metric, direction: criterion that ranks the trials. reference_batch_size: batch size for which the base's learning
    rate was tuned.
    """

    base: RunConfig
    question: SweepQuestion
    materials: Mapping[str, Material]
    metric: str
    direction: Literal["min", "max"]
    candidates: list[Settings] = field(default_factory=list)

    @property
    def reference_batch_size(self) -> int:
        return self.base.optimizer.reference_batch_size or self.base.batch.global_size

    @property
    def workers(self) -> int:
        """Number of workers of each trial."""
        return self.question.workers_per_trial

    def config(self, settings: Settings) -> RunConfig:
        """Return the config of a trial. Raises ConfigError."""
        return trial_config(self.base, settings, self.workers)

    def job(self, settings: Settings, *, started_at: float = 0.0) -> TrainJob:
        """Return the training of a trial. Raises ConfigError or DataError if it is invalid."""
        config = self.config(settings)
        material = self.materials[material_key(config.workload.args)]
        train = material.splits[TRAIN]
        recipe = derive(config, train.size)
        return TrainJob(
            config, recipe, material.workload, material.splits, started_at, varied=self.question.space.varied
        )

    def refuse(self, settings: Settings) -> str | None:
        """Return the reason why a trial cannot run, or None."""
        try:
            self.job(settings)
        except ScaleRayError as exc:
            return str(exc)
        return None

    def samples(self, settings: Settings) -> tuple[int, int, int]:
        """(samples of the whole training, samples before the first evaluation, number of evaluations)."""
        job = self.job(settings)
        plan, recipe = job.train_plan(), job.recipe
        every = min(recipe.evaluate_every_steps or recipe.total_steps, recipe.total_steps)
        total = _samples(plan, recipe.total_steps)
        return total, _samples(plan, every), -(-recipe.total_steps // every)


def trial_config(base: RunConfig, settings: Settings, workers: int) -> RunConfig:
    """Base config with a trial's settings and number of workers, without the settings that only a single run needs."""
    own: Settings = {
        "scale.workers": workers,
        "tracking.system_metrics": False,
        **NOTHING_SAVED,
        "schedule.watch": base.followed,
    }
    if base.optimizer.reference_batch_size is None:
        own["optimizer.reference_batch_size"] = base.batch.global_size
    return validate(_entries(base), {key: Entry(value, "sweep") for key, value in {**own, **settings}.items()})


def material_key(args: Mapping[str, Any]) -> str:
    """The workload's arguments as a key."""
    return json.dumps(args, sort_keys=True)


def all_args(base: RunConfig, space: Space) -> list[dict[str, Any]]:
    """All combinations of the workload's arguments in the space."""
    varied = {key: values for key, values in space.choices.items() if key.startswith(f"{ARGS}.")}
    only = Space(varied, (1.0,))
    found = [
        {**base.workload.args, **{key.removeprefix(f"{ARGS}."): v for key, v in combination.items() if key in varied}}
        for combination in only.combinations()
    ]
    return found or [dict(base.workload.args)]


def make_material(workload: Any, sources: Mapping[str, Source]) -> Material:
    """Return the material of a workload and its data. Raises DataError if trials cannot read the data."""
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    streamed = [name for name, split in splits.items() if split.is_streamed]
    if streamed:
        raise DataError(
            f"the {streamed[0]} data",
            "a Ray Dataset",
            "trials read their rows by index, each in its own workers",
            "give arrays, a ParquetSource or a TokenSource",
        )
    if len(splits) < 2:
        raise DataError.problem(
            "datasets()",
            f"has only the split {TRAIN!r}: trials are compared on another split",
            "return a 'val' split as well",
        )
    return Material(workload, splits, sources)


def make_plan(
    base: RunConfig, question: SweepQuestion, materials: Mapping[str, Material]
) -> tuple[SweepPlan, Candidates]:
    """Return the plan with its candidates, and those that cannot run. Raises UsageError if no sweep is possible."""
    splits = next(iter(materials.values())).splits
    metric, direction = _metric(base, question, splits)
    plan = SweepPlan(base, question, materials, metric, direction)
    candidates = choose(
        question.space, search=question.search, num_trials=question.num_trials, refuse=plan.refuse, seed=base.seed
    )
    if not candidates.chosen:
        _, reason = candidates.refused[0]
        number = len(candidates.refused)
        raise ConfigError.problem(
            "The sweep", f"has {number} combination{'s' * (number > 1)}, none of which can run: {reason}"
        )
    return dataclasses.replace(plan, candidates=candidates.chosen), candidates


def check_question(base: RunConfig, question: SweepQuestion) -> None:
    """Run the checks that need no data: keys and values of `--vary`, each of which must give a valid config, the
    scheduler, and batch sizes that the workers cannot share equally. Raises ConfigError."""
    for key, values in question.space.choices.items():
        for value in values:
            trial_config(base, {key: value, **({RULE: "none"} if key != RULE else {})}, question.workers_per_trial)
    _check_scheduler(base, question)
    _check_batch_sizes(base, question)


def _metric(base: RunConfig, question: SweepQuestion, splits: Mapping[str, Split]) -> tuple[str, Literal["min", "max"]]:
    target = base.stop.at
    text = question.metric
    if text is None and target is not None:
        text = f"{target.metric} {'max' if target.comparison == '>=' else 'min'}"
    evaluated = [name for name in splits if name not in (TRAIN, base.evaluation.only_at_end)]
    if not evaluated:
        raise ConfigError(
            "evaluation.test", "at_end", "trials are compared on this split, as there is no other split", "omit it"
        )
    text = text or base.checkpoint.best or f"{evaluated[0]}/loss min"
    metric, _, direction = text.strip().partition(" ")
    if direction not in ("min", "max") or "/" not in metric:
        raise ConfigError("--metric", text, "it must be a metric and min or max", "for example 'val/loss min'")
    if metric.partition("/")[0] not in evaluated:
        known = ", ".join(f"{name}/loss" for name in evaluated)
        raise ConfigError("--metric", metric, "no evaluation measures it", f"available: {known} ...")
    return metric, "max" if direction == "max" else "min"


def _check_scheduler(base: RunConfig, question: SweepQuestion) -> None:
    scheduler, space = question.scheduler, question.space
    if scheduler != "fifo" and base.evaluation.every is None:
        raise ConfigError(
            "--scheduler",
            scheduler,
            "it compares trials during training, which requires evaluation.every",
            "add --evaluation.every '1 epoch', or use fifo",
        )
    if scheduler != "pbt":
        return
    if question.search == "optuna":
        raise ConfigError(
            "--search",
            "optuna",
            "pbt mutates its own trials and does not accept suggestions",
            "use random or grid with pbt",
        )
    varied = [key for key, values in space.choices.items() if len(values) > 1]
    if varied:
        raise ConfigError(
            "--scheduler",
            "pbt",
            "trials copy weights and state from each other and may differ only in learning rate, not in "
            f"{', '.join(varied)}",
            "give one value each, or use asha",
        )
    if space.num_seeds == 1 and not isinstance(space.learning_rates, LogUniform) and len(space.learning_rates) < 2:
        raise ConfigError("--scheduler", "pbt", "pbt needs at least two trials", "give more learning rates")


def _check_batch_sizes(base: RunConfig, question: SweepQuestion) -> None:
    """Reject batch sizes in samples that workers cannot share equally; sizes in tokens depend on the data."""
    if base.batch.unit != "samples":
        return
    sizes = question.space.choices.get(BATCH_SIZE, ())
    shares = base.degrees(question.workers_per_trial).data
    bad = [size for size in sizes if size % shares]
    if bad and (question.batch_sizes_are_listed or len(bad) == len(sizes)):
        near = " or ".join(str(n) for n in nearest_multiples(bad[0], shares))
        raise ConfigError(
            "--batch-sizes",
            bad[0],
            f"{question.workers_per_trial} workers per trial need a multiple of {shares}",
            f"nearest: {near}",
        )


def _entries(base: RunConfig) -> dict[str, Entry]:
    entries = {}
    for section, values in base.model_dump(mode="json").items():
        flat = {f"{section}.{name}": v for name, v in values.items()} if isinstance(values, dict) else {section: values}
        entries.update({key: Entry(value, "sweep") for key, value in flat.items()})
    return {**entries, ARGS: Entry(dict(base.workload.args), "sweep")}


def _samples(plan: StepPlan, steps: int) -> int:
    if isinstance(plan, LengthPlan):
        epoch, before = plan.place(steps)
        return epoch * plan.num_samples + before
    epochs, rest = divmod(steps, plan.steps_per_epoch)
    in_epoch = (
        sum(plan.num_rows(step) for step in (0, plan.steps_per_epoch - 1))
        if plan.steps_per_epoch > 1
        else plan.num_rows(0)
    )
    in_epoch += max(0, plan.steps_per_epoch - 2) * plan.global_batch_size
    return epochs * in_epoch + min(rest * plan.global_batch_size, in_epoch)


def full_settings(plan: SweepPlan, settings: Settings) -> Settings:
    """Settings of a trial, completed with the base config's values for keys that every trial has."""
    try:
        config = plan.config(settings)
    except UsageError:
        config = plan.base
    return {
        BATCH_SIZE: config.batch.global_size,
        RULE: config.optimizer.rule,
        LEARNING_RATE: config.optimizer.learning_rate,
        OPTIMIZER: config.optimizer.name,
        WARMUP: str(config.schedule.warmup),
        SEED: config.seed,
        **settings,
    }
