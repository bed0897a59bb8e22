"""Trials of a sweep that share one training: all rules at the reference batch, a learning rate reached in two ways, or
a warm-up in two units. The training runs once and counts for each trial, so that noise does not separate the rules.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from scaleray.config.decides import is_beside_training
from scaleray.errors import ScaleRayError
from scaleray.records.sweep_record import Trial
from scaleray.sweeps.search_space import SEED, Settings
from scaleray.sweeps.sweep_plan import SweepPlan, full_settings
from scaleray.sweeps.trial_records import make_trial

DERIVED = {
    "optimizer": ("rule", "learning_rate", "reference_batch_size", "betas", "epsilon"),
    "schedule": ("warmup", "length"), "stop": ("after",), "evaluation": ("every", "micro_size"),
    "batch": ("global_size", "unit", "micro_size"), "strategy": ("name",),
}  # fmt: skip
"""Config keys that affect a training only through values derived from them."""
WITHOUT_BETAS = ("sgd", "lars")
DIGITS = 12
"""Significant digits compared in derived numbers, as two ways to the same number may differ in the last bit."""


def training_key(plan: SweepPlan, settings: Settings) -> str:
    """Key that is equal for settings with the same training, the seed included.

    Raises ConfigError or DataError for invalid settings.
    """
    job = plan.job(settings)
    config = {section: values for section, values in job.config.to_dict().items() if not is_beside_training(section)}
    for section, names in DERIVED.items():
        config[section] = {name: value for name, value in config[section].items() if name not in names}
    derived = job.recipe.values()
    workload = job.workload
    if job.config.optimizer.name in WITHOUT_BETAS and not callable(getattr(workload, "optimizer", None)):
        del derived["betas"], derived["epsilon"]
    return json.dumps([config, _rounded(derived)], sort_keys=True, default=str)


class SameTrainings:
    """Groups of a plan's trials that share one training.

    The trials of a population are never grouped, as they change during training.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.groups: dict[int, list[int]] = {}
        """Numbers of the trials that share a training, by trial number."""
        if (
            plan.question.scheduler == "pbt" or plan.question.search == "optuna"
        ):  # pbt requests other trials than the plan's
            return
        by_key: dict[str, list[int]] = {}
        for number, settings in enumerate(plan.candidates):
            # settings of an older sweep may no longer be allowed: the trial reports it
            with contextlib.suppress(ScaleRayError):
                by_key.setdefault(training_key(plan, settings), []).append(number)
        self.groups = {number: group for group in by_key.values() if len(group) > 1 for number in group}

    @property
    def num_shared(self) -> int:
        """Number of trials that need no training of their own."""
        return len(self.groups) - len({group[0] for group in self.groups.values()})

    def to_train(self, numbers: Iterable[int], trials: Sequence[Trial]) -> list[int]:
        """Choose the trials to train from `numbers`: one for each training that no trial has run."""
        known = {trial.number for trial in trials}
        chosen: list[int] = []
        for number in numbers:
            group = self.groups.get(number, [number])
            if known.isdisjoint(group):
                chosen.append(number)
                known.update(group)
        return chosen

    def counted(self, trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
        """Return records of other trials that share this one's training and have none yet."""
        if trial.same_as is not None:
            return []
        known = {other.number for other in trials} | {trial.number}
        group = self.groups.get(trial.number, ())
        return [counted_for(self.plan, trial, n, self.plan.candidates[n]) for n in group if n not in known]


def counted_for(plan: SweepPlan, trained: Trial, number: int, settings: Settings) -> Trial:
    """Record of trial `number`, which shares the training of `trained`: the same results, without worker time."""
    own = make_trial(plan, number, settings, status=trained.status)
    return dataclasses.replace(
        trained,
        number=number,
        rule=own.rule,
        batch_size=own.batch_size,
        learning_rate=own.learning_rate,
        warmup=own.warmup,
        seed=own.seed,
        settings=full_settings(plan, settings),
        total_time_s=0.0,
        run_id="",
        same_as=trained.number,
    )


def trained_by_key(plan: SweepPlan, trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trained trials, by the keys of their trainings."""
    found: dict[str, Trial] = {}
    for trial in trials:
        if trial.same_as is None:
            with contextlib.suppress(ScaleRayError):
                found.setdefault(training_key(plan, trial.settings), trial)
    return found


def without_seed(settings: Settings) -> Settings:
    """The settings with the base config's seed."""
    return {key: value for key, value in settings.items() if key != SEED}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
