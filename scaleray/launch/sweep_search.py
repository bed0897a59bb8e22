"""Ray Tune's schedulers and searches as a sweep uses them: by samples or evaluations, and for candidates that can run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from scaleray.errors import ConfigError
from scaleray.launch.sweep_plan import SweepPlan
from scaleray.launch.sweep_trial import EVALUATION, NUMBER, RATE, SAMPLES, SETTINGS, VALUE
from scaleray.scaling.search_space import LEARNING_RATE, SEED, LogUniform, Settings

REDUCTION_FACTOR = 3  # of ASHA and HyperBand: a third goes on
MOST_ASKS = 200  # for one suggestion that can run
MUTATION_SPAN = 4.0  # how far beyond the first learning rates a population may go, as a factor
PERTURBATIONS = 5  # of a population over a training


def make_scheduler(plan: SweepPlan, candidates: Sequence[Settings]) -> TrialScheduler:
    """The scheduler that the question names, in units of these trainings. Each counts what only grows, also when a trial is taken up again."""
    name = plan.question.scheduler
    if name == "fifo":
        return FIFOScheduler()
    lengths = [plan.samples(settings) for settings in candidates]
    total = max(samples for samples, _, _ in lengths)
    first = max(samples for _, samples, _ in lengths)
    evaluations = max(number for _, _, number in lengths)
    if name == "asha":
        return AsyncHyperBandScheduler(
            time_attr=SAMPLES, max_t=max(total, first + 1), grace_period=first, reduction_factor=REDUCTION_FACTOR,
            stop_last_trials=False,  # a training has an end of its own
        )  # fmt: skip
    if name == "hyperband":
        return HyperBandScheduler(time_attr=EVALUATION, max_t=evaluations, reduction_factor=REDUCTION_FACTOR)
    if name == "median":
        # its slices would set trials aside where too few are there to compare with
        return MedianStoppingRule(time_attr=SAMPLES, grace_period=first, min_time_slice=math.inf)
    low, high = _rates(candidates)
    return PopulationBasedTraining(
        time_attr=EVALUATION, perturbation_interval=max(1, evaluations // PERTURBATIONS), log_config=False,
        hyperparam_mutations={RATE: tune.loguniform(low / MUTATION_SPAN, high * MUTATION_SPAN)},
    )  # fmt: skip


def listed(plan: SweepPlan, numbers: Sequence[int]) -> dict[str, Any]:
    """Tune's search space for trials that are known by their numbers."""
    space: dict[str, Any] = {NUMBER: tune.grid_search(list(numbers))}
    if plan.question.scheduler == "pbt":
        rates = {number: plan.candidates[number][LEARNING_RATE] for number in numbers}
        space[RATE] = tune.sample_from(lambda spec: rates[spec.config[NUMBER]])
    return space


class OptunaSearcher(Searcher):
    """Asks Optuna for combinations, each of which runs with every seed; Optuna hears the mean.

    known: (settings, value) of trials that are done already. first_number: of the first trial to suggest.
    """

    def __init__(
        self, plan: SweepPlan, *, num_trials: int, first_number: int, known: Iterable[tuple[Settings, float | None]] = ()
    ) -> None:  # fmt: skip
        super().__init__(metric=VALUE, mode=plan.direction)
        self.optuna = import_optuna()
        self.plan, self.space = plan, plan.question.space
        self.left = num_trials
        self.number = first_number
        self.refused: dict[str, tuple[Settings, str]] = {}
        self._waiting: list[tuple[Any, Settings]] = []
        self._running: dict[str, Any] = {}
        self._values: dict[int, list[float]] = {}
        # concurrent trials: what runs counts as bad until it is known, so that it is not suggested again
        sampler = self.optuna.samplers.TPESampler(seed=plan.base.seed, constant_liar=True)
        self.study = self.optuna.create_study(
            direction="minimize" if plan.direction == "min" else "maximize", sampler=sampler
        )
        for settings, value in known:
            self._add_known(settings, value)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Nothing to learn from Tune."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config, or FINISHED."""
        if not self._waiting and not self._ask():
            return Searcher.FINISHED
        asked, settings = self._waiting.pop(0)
        self._running[trial_id] = asked
        number, self.number = self.number, self.number + 1
        return {NUMBER: number, SETTINGS: json.dumps(settings)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna once all seeds of a combination are done."""
        asked = self._running.pop(trial_id, None)
        if asked is None:
            return
        value = float((result or {}).get(VALUE, math.nan))
        values = self._values.setdefault(asked.number, [])
        values.append(value)
        if len(values) < self.space.num_seeds:
            return
        if all(map(math.isfinite, values)):
            self.study.tell(asked, sum(values) / len(values))
        else:
            self.study.tell(asked, state=self.optuna.trial.TrialState.FAIL)

    @property
    def has_running(self) -> bool:
        """Whether suggestions are out, or wait for their turn."""
        return bool(self._running or self._waiting)

    def save(self, checkpoint_path: str) -> None:
        """A sweep is continued from its own records."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def _ask(self) -> bool:
        if self.left <= 0:
            return False
        for _ in range(MOST_ASKS):
            asked = self.study.ask()
            settings = self._settings(asked)
            reason = self.plan.refuse(settings)
            if reason is None:
                self.left -= 1
                first = settings.get(SEED, self.space.first_seed)
                self._waiting = [(asked, {**settings, SEED: first + n}) for n in range(self.space.num_seeds)]
                return True
            self.study.tell(asked, state=self.optuna.trial.TrialState.FAIL)
            self.refused.setdefault(json.dumps({**settings, LEARNING_RATE: 0}, default=str), (settings, reason))
        return False

    def _settings(self, asked: Any) -> Settings:
        # places in the lists, as Optuna's categories can only be plain values
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
    """Optuna, quiet. Raises ConfigError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--search", "optuna", "Optuna is not installed here", "pip install 'scaleray[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _rates(candidates: Sequence[Settings]) -> tuple[float, float]:
    rates = [settings[LEARNING_RATE] for settings in candidates]
    return min(rates), max(rates)
