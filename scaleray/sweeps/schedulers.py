"""Schedulers of Ray Tune for a sweep, which stop trials early, by samples or evaluations."""

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

REDUCTION_FACTOR = 3  # of ASHA and HyperBand: a third of the trials continues

MUTATION_SPAN = 4.0  # factor by which a population may leave the range of the initial learning rates

PERTURBATIONS = 5  # number of times that a population is perturbed during a training


def make_scheduler(plan: SweepPlan, candidates: Sequence[Settings]) -> TrialScheduler:
    """Return the scheduler named in the question, in units of these trainings.

    Each scheduler counts a quantity that only grows, even when a trial is resumed.
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
            stop_last_trials=False,  # trainings end by themselves
        )
    if name == "hyperband":
        return HyperBandScheduler(time_attr=EVALUATION, max_t=evaluations, reduction_factor=REDUCTION_FACTOR)
    if name == "median":
        # its time slices would pause trials before there are enough to compare
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
