"""Points of a curve, from their measurements: steady steps and their cost."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.config import RunConfig
from scaleray.data import TRAIN
from scaleray.errors import RunFailedError
from scaleray.live.state.measured_series import PointSoFar
from scaleray.records.run_record import EMULATED
from scaleray.records.study_record import Estimate, Mode, Point, Repeat
from scaleray.records.workload_profile import ImpossibleUtilisation, WorkloadProfile, mfu
from scaleray.studies.curves.efficiency import median_step_time, throughput
from scaleray.studies.curves.steady_state import steady_state
from scaleray.studies.hardware import OVERSUBSCRIBED, peak_flops
from scaleray.studies.measure_sizes import StudySize
from scaleray.studies.repeat_store import studies_of

NOT_STEADY = "not steady"
"""Mark of a point whose measurements drift, or have too few steps to show a drift."""


def point_so_far(mode: Mode, size: StudySize) -> PointSoFar:
    """Result of the measurements so far, at least one, for live displays: the median of all their steps. It takes a
    millisecond, and may be called during the next measurement.
    """
    step_s = statistics.median(step for turn in list(size.turns) for step in turn.step_times_s)
    rate = size.job.recipe.global_batch_size / step_s
    return PointSoFar(mode, size.workers, Estimate(rate, rate, rate), Estimate(step_s, step_s, step_s))


def point_of(mode: Mode, size: StudySize, config: RunConfig, *, profile: WorkloadProfile | str, study: str) -> Point:
    """The point from its measurements so far, at least one. profile: counts of the model's operations, or the reason
    for their absence. study: name of this study. A point is marked if half of its measurements are not steady. Raises
    RunFailedError for an impossible MFU over 100 %."""
    turns, recipe, workers = size.turns, size.job.recipe, size.workers
    every = [periods(turn.step_times_s, size.period) for turn in turns]
    states = [steady_state(times) for times in every]
    steady = [times[state.first :] for times, state in zip(every, states, strict=True)]
    step_time = median_step_time(steady)
    samples_per_s = throughput(steady, samples_per_step=recipe.global_batch_size)
    tokens = size.job.splits[TRAIN].tokens_per_row
    shares = [split(statistics.median(times), turn, workers) for times, turn in zip(steady, turns, strict=True)]
    comm_shares = [share.comm for share in shares if share.comm is not None]
    num_unsteady = sum(not state.is_steady for state in states)
    comm_times = [turn.comm_s for turn in turns if turn.comm_s is not None]
    t = step_time.value
    return Point(
        mode=mode,
        workers=workers,
        strategy=recipe.strategy,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        accumulation_steps=recipe.accumulation_steps,
        turns=steady,
        rounds=[turn.round_name for turn in turns],
        num_warmup_steps=max(state.first for state in states) * size.period,
        step_time_s=step_time,
        samples_per_s=samples_per_s,
        tokens_per_s=throughput(steady, samples_per_step=recipe.global_batch_size * tokens) if tokens else None,
        compute_s=statistics.fmean(share.compute for share in shares) * t,
        exposed_comm_s=statistics.fmean(comm_shares) * t if len(comm_shares) == len(shares) else None,
        input_wait_s=statistics.fmean(share.input for share in shares) * t,
        other_s=statistics.fmean(share.other for share in shares) * t,
        comm_s=statistics.median(comm_times) if comm_times else (0.0 if workers == 1 else None),
        sent_bytes=statistics.fmean(turn.sent_bytes for turn in turns),
        mfu=_mfu(samples_per_s.value, size, config, profile),
        peak_memory_bytes=max(turn.peak_memory_bytes for turn in turns),
        cost_per_million_samples=cost_per_million_samples(
            samples_per_s.value, workers, config.study.price_per_worker_hour
        ),
        noise_scale=size.noise.scale if size.noise else None,
        noise=size.noise,
        to_target=size.to_target,
        marks=[*_marks(size), *([NOT_STEADY] if 2 * num_unsteady >= len(turns) else [])],
        reused_from=studies_of(turns, own=study),
        measured_at=max(turn.measured_at for turn in turns),
    )


@dataclass(frozen=True)
class TimeSplit:
    """Division of a measurement's step time into shares that add up to 1. comm: None if it is part of compute."""

    compute: float
    comm: float | None
    input: float
    other: float


def split(step_time_s: float, turn: Repeat, workers: int) -> TimeSplit:
    """Shares of a step's time. Compute: the time of the same work alone; `other`: its extra time on the slowest worker
    of a step; communication: the remainder."""
    wait = min(1.0, max(0.0, turn.input_share))
    rest = 1.0 - wait
    if turn.alone_s is None:
        return TimeSplit(rest, 0.0 if workers == 1 else None, wait, 0.0)
    compute = min(rest, turn.alone_s / step_time_s)
    slowest = max(turn.alone_s, turn.slowest_alone_s or 0.0) / step_time_s
    other = min(rest - compute, slowest - turn.alone_s / step_time_s)
    return TimeSplit(compute, rest - compute - other, wait, other)


def periods(times: Sequence[float], period: int) -> list[float]:
    """Means of consecutive groups of `period` steps; steps at the start that do not fill a group are omitted."""
    first = len(times) % period
    return [statistics.fmean(times[start : start + period]) for start in range(first, len(times), period)]


def cost_per_million_samples(samples_per_s: float, workers: int, price_per_worker_hour: float | None) -> float | None:
    """Cost of a million samples, in the unit of the price; None without a price."""
    return None if price_per_worker_hour is None else price_per_worker_hour * workers / 3600 * 1e6 / samples_per_s


def _marks(size: StudySize) -> list[str]:
    if any(turn.is_emulated for turn in size.turns):  # sleeping workers need no core
        return [EMULATED, *(mark for mark in size.marks if mark != OVERSUBSCRIBED)]
    return size.marks


def _mfu(samples_per_s: float, size: StudySize, config: RunConfig, profile: WorkloadProfile | str) -> float | None:
    peak = peak_flops(config, size.turns)
    if not peak or isinstance(profile, str) or not profile.flops:
        return None
    try:
        return mfu(profile.flops * samples_per_s, time_s=1.0, peak_flops_per_s=peak, num_devices=size.workers)
    except ImpossibleUtilisation as exc:
        raise RunFailedError(
            f"{exc}. Correct study.peak_tflops, the peak of one worker; the measurements are stored"
        ) from exc
