"""Searchers of Ray Tune for a sweep, limited to feasible candidates."""

import contextlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import tune
from ray.tune.search import Searcher

from scaleray.common.installed import install_command
from scaleray.errors import ConfigError, ScaleRayError
from scaleray.sweeps.same_trainings import training_key, without_seed
from scaleray.sweeps.search_space import LEARNING_RATE, SEED, LogUniform, Settings
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.trial import NUMBER, RATE, SETTINGS, VALUE

MOST_ASKS = 200  # most attempts to get one feasible suggestion from Optuna
MOST_KNOWN = 8  # most suggestions of known trainings before an unknown one is chosen


def listed(plan: SweepPlan, numbers: Sequence[int]) -> dict[str, Any]:
    """Tune's search space for trials identified by their numbers."""
    space: dict[str, Any] = {NUMBER: tune.grid_search(list(numbers))}
    if plan.question.scheduler == "pbt":
        rates = {number: plan.candidates[number][LEARNING_RATE] for number in numbers}
        space[RATE] = tune.sample_from(lambda spec: rates[spec.config[NUMBER]])
    return space


@dataclass
class _Training:
    """Training shared by one or more combinations.

    asked: Optuna trial that runs it, if any; others: Optuna trials that wait for its result.
    """

    asked: Any = None
    others: list[Any] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    is_done: bool = False

    @property
    def mean(self) -> float | None:
        """Mean of the values of all seeds; None if a seed has no value."""
        return sum(self.values) / len(self.values) if all(map(math.isfinite, self.values)) else None


class OptunaSearcher(Searcher):
    """Request combinations from Optuna, run each with every seed, and report the mean to Optuna.

    A combination with the same training as another one is not run; Optuna receives that one's value. known: (settings,
    value) of finished trials. first_number: number of the first trial to suggest.
    """

    def __init__(
        self,
        plan: SweepPlan,
        *,
        num_trials: int,
        first_number: int,
        known: Iterable[tuple[Settings, float | None]] = (),
    ) -> None:
        super().__init__(metric=VALUE, mode=plan.direction)
        self.optuna = import_optuna()
        self.plan, self.space = plan, plan.question.space
        self.left = num_trials
        self.number = first_number
        self.refused: dict[str, tuple[Settings, str]] = {}
        self.same: list[Settings] = []
        """Settings, for every seed, of suggested combinations that were not run because another one has the same
        training."""
        self._trainings: dict[str, _Training] = {}
        self._said: set[str] = set()
        self.num_known = 0
        """Number of suggestions whose training was already known."""
        self._waiting: list[tuple[Any, Settings]] = []
        self._running: dict[str, Any] = {}
        # concurrent trials: a running one counts as bad until it ends, so that it is not suggested again
        sampler = self.optuna.samplers.TPESampler(seed=plan.base.seed, constant_liar=True)
        self.study = self.optuna.create_study(
            direction="minimize" if plan.direction == "min" else "maximize", sampler=sampler
        )
        for settings, value in known:
            self._add_known(settings, value)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Accept Tune's properties; none of them is used."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's config, or FINISHED."""
        if not self._waiting and not self._ask():
            return Searcher.FINISHED
        asked, settings = self._waiting.pop(0)
        self._running[trial_id] = asked
        number, self.number = self.number, self.number + 1
        return {NUMBER: number, SETTINGS: json.dumps(settings)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report a combination's value to Optuna once all of its seeds are done."""
        asked = self._running.pop(trial_id, None)
        if asked is None:
            return
        value = float((result or {}).get(VALUE, math.nan))
        training = next(t for t in self._trainings.values() if t.asked is asked)
        training.values.append(value)
        if len(training.values) < self.space.num_seeds:
            return
        training.is_done = True
        for one in (asked, *training.others):
            self._tell(one, training.mean)

    @property
    def has_running(self) -> bool:
        """Whether suggestions are running or queued."""
        return bool(self._running or self._waiting)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a sweep continues from its own records."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing; see `save`."""

    def _ask(self) -> bool:
        if self.left <= 0:
            return False
        known = self.num_known
        for _ in range(MOST_ASKS):
            if self._take(self.study.ask()):
                return True
            if self.space.is_finite and self.num_known - known >= MOST_KNOWN:
                break  # a sampler that has found the best of a few combinations keeps suggesting it
        for params in self._untried():
            self.study.enqueue_trial(params)
            if self._take(self.study.ask()):
                return True
        return False

    def _take(self, asked: Any) -> bool:
        """Accept a suggestion from Optuna; return whether it has to be trained."""
        settings = self._settings(asked)
        name = self._name(settings)
        is_new = name not in self._said
        self._said.add(name)
        if (reason := self.plan.refuse(settings)) is not None:
            self._tell(asked, None)
            self.refused.setdefault(json.dumps({**settings, LEARNING_RATE: 0}, default=str), (settings, reason))
            return False
        first = settings.get(SEED, self.space.first_seed)
        seeds = [{**settings, SEED: first + n} for n in range(self.space.num_seeds)]
        key = training_key(self.plan, without_seed(settings))
        training = self._trainings.get(key)
        if training is None:
            self._trainings[key] = _Training(asked)
            self.left -= 1
            self._waiting = [(asked, one) for one in seeds]
            return True
        self.num_known += 1
        if is_new:
            self.same += seeds
        if training.is_done:
            self._tell(asked, training.mean)
        else:
            training.others.append(asked)
        return False

    def _tell(self, asked: Any, value: float | None) -> None:
        if value is None:
            self.study.tell(asked, state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(asked, value)

    def _untried(self) -> Iterator[dict[str, Any]]:
        """Optuna parameters of combinations that were not suggested yet, if all combinations can be listed."""
        rates = self.space.learning_rates
        if isinstance(rates, LogUniform):
            return
        combinations = self.space.combinations()
        random.Random(self.number).shuffle(combinations)
        for settings in combinations:
            if self._name(settings) not in self._said:
                places = {key: values.index(settings[key]) for key, values in self.space.choices.items()}
                yield {**places, LEARNING_RATE: rates.index(settings[LEARNING_RATE])}

    def _name(self, settings: Settings) -> str:
        return json.dumps([settings.get(key) for key in (*self.space.choices, LEARNING_RATE)], default=str)

    def _settings(self, asked: Any) -> Settings:
        # indices into the lists, as Optuna's categories can only be plain values
        settings = {
            key: values[asked.suggest_categorical(key, list(range(len(values))))]
            for key, values in self.space.choices.items()
        }
        rates = self.space.learning_rates
        if isinstance(rates, LogUniform):
            settings[LEARNING_RATE] = asked.suggest_float(LEARNING_RATE, rates.low, rates.high, log=True)
        else:
            settings[LEARNING_RATE] = rates[asked.suggest_categorical(LEARNING_RATE, list(range(len(rates))))]
        return settings

    def _add_known(self, settings: Settings, value: float | None) -> None:
        self._said.add(self._name(settings))
        with contextlib.suppress(ScaleRayError):  # settings of an older sweep may no longer be allowed
            training = self._trainings.setdefault(
                training_key(self.plan, without_seed(settings)), _Training(is_done=True)
            )
            training.values.append(math.nan if value is None else value)
        distributions = self.optuna.distributions
        params: dict[str, Any] = {}
        kinds: dict[str, Any] = {}
        for key, values in self.space.choices.items():
            if settings.get(key) not in values:
                return
            params[key], kinds[key] = (
                values.index(settings[key]),
                distributions.CategoricalDistribution(range(len(values))),
            )
        rates = self.space.learning_rates
        if isinstance(rates, LogUniform):
            params[LEARNING_RATE] = settings[LEARNING_RATE]
            kinds[LEARNING_RATE] = distributions.FloatDistribution(rates.low, rates.high, log=True)
        else:
            params[LEARNING_RATE] = rates.index(settings[LEARNING_RATE])
            kinds[LEARNING_RATE] = distributions.CategoricalDistribution(range(len(rates)))
        is_good = value is not None and math.isfinite(value)
        state = self.optuna.trial.TrialState.COMPLETE if is_good else self.optuna.trial.TrialState.FAIL
        self.study.add_trial(
            self.optuna.trial.create_trial(
                params=params, distributions=kinds, value=value if is_good else None, state=state
            )
        )


def import_optuna() -> Any:
    """Return Optuna with its logging silenced. Raises ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("--search", "optuna", "Optuna is not installed here", install_command("search")) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
