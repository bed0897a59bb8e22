"""Record of a trial, and its line on the terminal."""

import math
import time
from collections.abc import Sequence

from scaleray.errors import ScaleRayError
from scaleray.records.sweep_record import Trial
from scaleray.sweeps.search_space import (
    BATCH_SIZE,
    LEARNING_RATE,
    MUTATIONS,
    OPTIMIZER,
    RULE,
    SEED,
    WARMUP,
    Settings,
    to_text,
)
from scaleray.sweeps.sweep_plan import SweepPlan, full_settings


def make_trial(
    plan: SweepPlan,
    number: int,
    settings: Settings,
    *,
    status: str,
    error: str = "",
    points: Sequence[tuple[int, float, float]] = (),
    recorded_at: Sequence[float] = (),
    value: float | None = None,
    samples: int = 0,
    seconds: float = 0.0,
    total_s: float = 0.0,
    samples_per_s: float | None = None,
    noise_scale: float | None = None,
    noise_interval: tuple[float, float | None] | None = None,
    mutations: Sequence[str] = (),
    ended_at: float | None = None,
) -> Trial:
    """Return the record of a trial.

    points: (samples, seconds, value) of its evaluations; recorded_at: their wall clock. ended_at: None means now.
    """
    everything = full_settings(plan, settings)
    try:
        recipe = plan.job(settings).recipe
        batch_size, rate = recipe.global_batch_size, recipe.learning_rate or float(everything[LEARNING_RATE])
    except ScaleRayError:  # a trial that cannot run
        batch_size, rate = int(everything[BATCH_SIZE]), float(everything[LEARNING_RATE])
    hit = _target_hit(plan, points, end=(samples, seconds) if status == "target reached" else None)
    if mutations:
        everything[MUTATIONS] = list(mutations)
    return Trial(
        number=number,
        status=status,
        batch_size=batch_size,
        rule=str(everything[RULE]),
        learning_rate=rate,
        optimizer=str(everything[OPTIMIZER]),
        warmup=str(everything[WARMUP]),
        seed=int(everything[SEED]),
        workers=plan.workers,
        settings=everything,
        metric=plan.metric,
        value=value if value is not None and math.isfinite(value) else None,
        curve=list(points),
        recorded_at=list(recorded_at),
        samples_to_target=hit[0] if hit else None,
        time_to_target_s=hit[1] if hit else None,
        samples=samples,
        training_time_s=seconds,
        total_time_s=total_s,
        samples_per_s=samples_per_s,
        noise_scale=noise_scale,
        noise_interval=noise_interval,
        error=error,
        ended_at=time.time() if ended_at is None else ended_at,
    )


def _target_hit(
    plan: SweepPlan, points: Sequence[tuple[int, float, float]], *, end: tuple[int, float] | None
) -> tuple[int, float] | None:
    """(samples, seconds) to the target. end: of the whole trial if the target ended it, used if points are of another
    metric."""
    target = plan.base.stop.at
    if target is None or target.metric != plan.metric:
        return end
    return next(((n, s) for n, s, v in points if target.is_reached({target.metric: v})), None)


def trial_line(trial: Trial, number: int, total: int, *, same_as: int | None = None) -> str:
    """One line for a trial, in fixed columns. number: position of the line. same_as: position of the trial whose
    training counts for this one."""
    others = to_text(trial.settings)
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    line = (
        f"trial {number:>4}/{total} | batch {trial.batch_size:>6} | {trial.rule:<6} | lr {trial.learning_rate:<9.3g} | "
        f"{trial.optimizer:<5} | {f'{others} | ' if others else ''}seed {trial.seed} | "
        f"{trial.metric} {value} | {trial.samples:,} samples | "
        f"{trial.training_time_s:.3g} s | {trial.status}"
    )
    if trial.same_as is not None:
        return f"{line}, the same training as trial {same_as or trial.same_as + 1}"
    return f"{line}: {trial.error.splitlines()[0]}" if trial.error else line
