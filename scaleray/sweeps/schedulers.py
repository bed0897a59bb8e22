"""Ray Tune's schedulers as a sweep uses them: which trials are stopped early, by samples or evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from scaleray.sweeps.search_space import LEARNING_RATE, Settings
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.trial import EVALUATION, RATE, SAMPLES

REDUCTION_FACTOR = 3  # ASHA's and HyperBand's: a third of the trials goes on

MUTATION_SPAN = 4.0  # how far beyond the first learning rates a population may go, as a factor

PERTURBATIONS = 5  # number of times that a population is perturbed over a training


def make_scheduler(plan: SweepPlan, candidates: Sequence[Settings]) -> TrialScheduler:
    """The scheduler that the question names, in units of these trainings.

    Each counts what only grows, also when a trial is taken up again.
    """
    name = plan.question.scheduler
    if name == "fifo":
        return FIFOScheduler()
    lengths = [plan.samples(settings) for settings in candidates]
    total = max(samples for samples, _, _ in lengths)
    first = max(samples for _, samples, _ in lengths)
    evaluations = max(number for _, _, number in lengths)
    if name == "asha":
        return AsyncHyperBandScheduler(
            time_attr=SAMPLES,
            max_t=max(total, first + 1),
            grace_period=first,
            reduction_factor=REDUCTION_FACTOR,
            stop_last_trials=False,  # a training has an end of its own
        )
    if name == "hyperband":
        return HyperBandScheduler(time_attr=EVALUATION, max_t=evaluations, reduction_factor=REDUCTION_FACTOR)
    if name == "median":
        # its slices would set trials aside where too few are there to compare with
        return MedianStoppingRule(time_attr=SAMPLES, grace_period=first, min_time_slice=math.inf)
    low, high = _rates(candidates)
    return PopulationBasedTraining(
        time_attr=EVALUATION,
        perturbation_interval=max(1, evaluations // PERTURBATIONS),
        log_config=False,
        hyperparam_mutations={RATE: tune.loguniform(low / MUTATION_SPAN, high * MUTATION_SPAN)},
    )


def _rates(candidates: Sequence[Settings]) -> tuple[float, float]:
    rates = [settings[LEARNING_RATE] for settings in candidates]
    return min(rates), max(rates)
