"""What each rule is shown to raise its alert, and what to keep silent: series with a point every five seconds.

The same cases are played to Prometheus (`promtool test rules`) and to the evaluator of one run, so that the two cannot drift
apart. In GONE a series has ended; None is no point, as of a metric that comes later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import Metric, prometheus_name
from scaleray.live.rules import gpu_rules

EVERY_S = 5
GONE = "gone"
Point = float | str | None
Points = Sequence[Point]
GPU = {"gpu": "0", "UUID": "GPU-0", "instance": "here:9400"}
RUN = {"ray_train_run_name": "digits", "run_id": "d1"}
Series = dict[tuple[str, str], Points]
"""Points by metric and rank (or GPU); the rank of a metric of the whole run is empty."""


@dataclass(frozen=True)
class Case:
    """Series and what they should do. at: number of the point at which it is looked at; None: the last."""

    rule: str
    what: str
    series: Series
    fires: bool
    labels: dict[str, str] = field(default_factory=dict)
    at: int | None = None
    is_judged: bool = True
    """Whether one run can know it of itself."""

    @property
    def at_s(self) -> int:
        """Seconds at which it is looked at."""
        last = max(len(points) for points in self.series.values()) - 1
        return EVERY_S * (last if self.at is None else self.at)


def of(metric: Metric | str, points: Points, rank: str = "") -> Series:
    """One series."""
    return {(metric if isinstance(metric, str) else prometheus_name(metric), rank): points}


def still(value: float, count: int) -> list[float]:
    """The same value again and again."""
    return [value] * count


def steps_end(count: int, *, last: int | None = None) -> list[float]:
    """Times of the last step, which ends at each point, up to number `last`."""
    return [float(EVERY_S * min(number, count if last is None else last)) for number in range(count)]


def noisy(level: float, count: int, *, spread: float = 0.1) -> list[float]:
    """Values around a level, the same each time."""
    return [level + spread * math.sin(1.7 * number) for number in range(count)]


def rising(count: int, *, at: int, by: float = 1.0) -> list[float]:
    """A counter that is 0 until point `at`."""
    return [0.0 if number < at else by for number in range(count)]


TWO = ("0", "1")


def _both(metric: Metric | str, *points: Points) -> Series:
    return {key: value for rank, one in zip(TWO, points, strict=True) for key, value in of(metric, one, rank).items()}


STEP = _both(names.STEP_TIME_S, still(0.1, 300), still(0.1, 300))


def _course() -> list[Case]:
    hang, goes_on = steps_end(20, last=8), steps_end(20)
    evaluates = of(live.LONG_PHASE_TIMESTAMP_S, [None] * 9 + [5.0 * min(number, 25) for number in range(9, 40)])
    after_it = {**_both(live.LAST_STEP_TIMESTAMP_S, *[steps_end(40, last=8)] * 2), **STEP, **evaluates}
    slow_steps = _both(names.STEP_TIME_S, still(10, 20), still(10, 20))
    lost = [*steps_end(10), *[GONE] * 10]
    size, planned = of(names.WORKERS, still(2, 20)), of(live.STEPS_PLANNED, still(100, 20))
    restarts = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    return [
        Case("no_progress", "all ranks stand", {**_both(live.LAST_STEP_TIMESTAMP_S, hang, hang), **STEP}, True, at=19),
        Case("no_progress", "steps end", {**_both(live.LAST_STEP_TIMESTAMP_S, goes_on, goes_on), **STEP}, False, at=19),
        Case("no_progress", "an evaluation of more than a minute", after_it, False, at=25),
        Case("no_progress", "the evaluation has just ended, and the next step is on its way", after_it, False, at=30),
        Case("no_progress", "no step comes after the evaluation", after_it, True, at=33),
        Case("no_progress", "steps are long", {**_both(live.LAST_STEP_TIMESTAMP_S, hang, hang), **slow_steps}, False),
        Case(
            "no_progress",
            "all steps are taken, and the final weights are written",
            {**_both(live.LAST_STEP_TIMESTAMP_S, hang, hang), **of(live.STEPS, still(100, 20)), **planned},
            False,
        ),
        Case("worker_lost", "one of two", {**_both(live.LAST_STEP_TIMESTAMP_S, goes_on, lost), **size}, True),
        Case("worker_lost", "all", {**_both(live.LAST_STEP_TIMESTAMP_S, lost, lost), **size}, True),
        Case(
            "worker_lost",
            "one, and they were started again at once",
            {
                **_both(live.LAST_STEP_TIMESTAMP_S, goes_on, goes_on),
                **size,
                **of(live.STEPS, [float(n) for n in range(20)]),
                **of(live.RESTARTS, rising(20, at=15)),
            },
            True,
        ),
        Case(
            "worker_lost",
            "a run that goes on counts the attempts before",
            {
                **_both(live.LAST_STEP_TIMESTAMP_S, goes_on, goes_on),
                **size,
                **of(live.STEPS, [float(n) for n in range(20)]),
                **of(live.RESTARTS, still(1, 20)),
            },
            False,
            at=8,
        ),
        Case("worker_lost", "none", {**_both(live.LAST_STEP_TIMESTAMP_S, goes_on, goes_on), **size}, False),
        Case(
            "worker_lost",
            "all, as they are done",
            {**_both(live.LAST_STEP_TIMESTAMP_S, lost, lost), **size, **planned, **of(live.STEPS, still(100, 20))},
            False,
        ),
        Case("restarts", "three", of(live.RESTARTS, restarts), True),
        Case("restarts", "two", of(live.RESTARTS, restarts[:6]), False),
        Case("run_failed", "it says so", of(live.RUN_FAILED, [0.0, 0.0, 1.0]), True),
        Case("run_failed", "it goes on", of(live.RUN_FAILED, still(0, 10)), False),
        Case("run_finished", "it says so", of(live.RUN_FINISHED, [0.0, 0.0, 1.0]), True),
        Case("run_finished", "it goes on", of(live.RUN_FINISHED, still(0, 10)), False),
    ]


def _speed() -> list[Case]:
    before, after = noisy(100, 60, spread=5), noisy(60, 30, spread=5)
    grows = of(names.WORKERS, [*still(4, 60), *still(2, 30)])
    slower = of(names.SAMPLES_PER_S, [*before, *after])
    rank_1 = {"rank": "1", "node": "here"}
    link = of(live.LINK_RATIO, [*noisy(0.8, 20), *still(0.4, 10)])
    one_of_three = {"source": "1", "to": "2"}

    def waits(share: float) -> Series:
        return of(live.EXPOSED_COMMUNICATION_SHARE, still(share, 30))

    late = _both(live.LATENESS_S, still(0.0, 12), still(0.03, 12))
    return [
        Case("straggler", "three tenths of a step", {**late, **STEP}, True, rank_1, at=11),
        Case("straggler", "too short", {**late, **STEP}, False, at=3),
        Case(
            "straggler",
            "evenly",
            {**_both(live.LATENESS_S, noisy(0.002, 12, spread=0.001), noisy(0.002, 12, spread=0.001)), **STEP},
            False,
            at=11,
        ),
        Case("slow_link", "half", {**link, **waits(0.3)}, True),
        Case("slow_link", "half, hidden behind the backward pass", {**link, **waits(0.02)}, False),
        Case("slow_link", "as ever", {**of(live.LINK_RATIO, noisy(0.5, 30)), **waits(0.3)}, False),
        Case("slow_pair", "a tenth", of(live.SLOWEST_LINK, [None, None, 0.1], "1 to 2"), True, one_of_three),
        Case("slow_pair", "all are alike", of(live.SLOWEST_LINK, [None, None, 0.8], "1 to 2"), False),
        Case("slower_than_before", "six tenths", {**slower, **of(names.WORKERS, still(4, 90))}, True),
        Case("slower_than_before", "fewer workers", {**slower, **grows}, False),
        Case("slower_than_before", "as ever", of(names.SAMPLES_PER_S, noisy(100, 90, spread=15)), False),
        Case("slower_than_before", "no past yet", of(names.SAMPLES_PER_S, [*still(100, 10), *still(50, 13)]), False),
        Case("slower_than_predicted", "half", of(live.EFFICIENCY_OVER_PREDICTION, still(0.5, 20)), True),
        Case("slower_than_predicted", "a little", of(live.EFFICIENCY_OVER_PREDICTION, still(0.9, 20)), False),
        Case("input_starved", "half of a step", of(names.INPUT_WAIT_SHARE, still(0.5, 10)), True),
        Case("input_starved", "one slow batch", of(names.INPUT_WAIT_SHARE, [*still(0.5, 3), *still(0.01, 7)]), False),
    ]


def _learning() -> list[Case]:
    falls = [2.0 + 3.0 * 0.98**number for number in range(100)]
    near_zero = noisy(0.0, 60, spread=0.01)
    return [
        Case("loss_spike", "three in a row", of(names.LOSS, [*noisy(2, 60), *still(4, 3)]), True),
        Case("loss_spike", "of a loss below zero", of(names.LOSS, [*noisy(-2, 60), *still(-0.5, 3)]), True),
        Case("loss_spike", "one alone", of(names.LOSS, [*noisy(2, 60), 9.0, *noisy(2, 2)]), False),
        Case(
            "loss_spike", "three that are not in a row", of(names.LOSS, [*noisy(2, 60), 9.0, 2.0, 9.0, 2.0, 9.0]), False
        ),
        Case("loss_spike", "a loss that falls", of(names.LOSS, falls), False),
        Case("loss_spike", "a loss near zero", of(names.LOSS, near_zero), False),
        Case("loss_spike", "a loss that never moves", of(names.LOSS, [*still(1, 60), *still(1.01, 5)]), False),
        Case("loss_spike", "too early", of(names.LOSS, [*noisy(2, 10), *still(9, 3)]), False),
        Case("nonfinite", "one step", of(names.NONFINITE_STEPS, [None, None, 1.0, 1.0]), True),
        Case("nonfinite", "none of late", of(names.NONFINITE_STEPS, still(3, 100)), False),
        Case("nonfinite", "none", of(names.NONFINITE_STEPS, still(0, 10)), False),
        Case("loss_scale_collapse", "by 2048", of(names.LOSS_SCALE, [*still(65536, 10), 32.0]), True),
        Case("loss_scale_collapse", "below one", of(names.LOSS_SCALE, still(0.5, 3)), True),
        Case("loss_scale_collapse", "as it finds its value", of(names.LOSS_SCALE, [65536, 32768, 16384, 8192]), False),
        Case("gradient_explosion", "thirty times", of(names.GRAD_NORM, [*noisy(1, 60), *still(30, 3)]), True),
        Case("gradient_explosion", "one alone", of(names.GRAD_NORM, [*noisy(1, 60), 30.0, 1.0]), False),
        Case("gradient_explosion", "twice", of(names.GRAD_NORM, [*noisy(1, 60), *still(2, 9)]), False),
    ]


def _upkeep() -> list[Case]:
    gib = 2.0**30
    rank_0 = {"rank": "0", "node": "here"}
    limit, grows = (
        of(live.MEMORY_LIMIT_BYTES, still(80 * gib, 400), "0"),
        [(20 + number / 50) * gib for number in range(400)],
    )

    leaks = [(2 + max(0, number - 4) * 5 / 32) * gib for number in range(120)]
    jumps = [(2 + 3 * (number > 60) + 3 * (number > 64)) * gib for number in range(120)]
    of_24 = of(live.MEMORY_LIMIT_BYTES, still(24 * gib, 120), "0")

    def used(points: Points) -> Series:
        return of(live.MEMORY_BYTES, points, "0")

    def aged(age_s: float, *, took_s: float | None = None) -> Series:
        took = {} if took_s is None else of(names.CHECKPOINT_DURATION_S, still(took_s, 2))
        return {**of(live.CHECKPOINT_AGE_S, [10.0, age_s]), **of(live.CHECKPOINT_INTERVAL_S, still(12, 2)), **took}

    return [
        Case("memory_near_limit", "78 of 80 GiB", {**used(still(78 * gib, 6)), **limit}, True, rank_0, at=5),
        Case("memory_near_limit", "60 of 80 GiB", {**used(still(60 * gib, 6)), **limit}, False, at=5),
        Case("memory_filling", "32 MiB a second of 24 GiB", {**used(leaks), **of_24}, True, rank_0, at=60),
        Case("memory_filling", "in the first two minutes, as caches fill", {**used(leaks[4:]), **of_24}, False, at=20),
        Case("memory_filling", "goes up and down", {**used(noisy(20 * gib, 120, spread=gib)), **of_24}, False),
        Case("memory_filling", "a room that is taken at once", {**used(jumps), **of_24}, False, at=63),
        Case("memory_filling", "the next one 20 seconds later", {**used(jumps), **of_24}, False, at=66),
        Case("memory_filling", "slowly", {**used([(2 + n / 1000) * gib for n in range(120)]), **of_24}, False),
        Case("memory_creeping", "grows all the time", used(grows), True, rank_0),
        Case(
            "memory_creeping",
            "goes up and down",
            used([(20 + 4 * (number % 20) / 20) * gib for number in range(400)]),
            False,
        ),
        Case("disk_nearly_full", "two hundredths left", of(live.DISK_FREE, [0.5, 0.02]), True),
        Case("disk_nearly_full", "a half left", of(live.DISK_FREE, [0.5, 0.5]), False),
        Case(
            "checkpoint_too_old",
            "three distances",
            {**of(live.CHECKPOINT_AGE_S, [100.0, 1800.0]), **of(live.CHECKPOINT_INTERVAL_S, still(600, 2))},
            True,
        ),
        Case(
            "checkpoint_too_old",
            "one distance",
            {**of(live.CHECKPOINT_AGE_S, [100.0, 600.0]), **of(live.CHECKPOINT_INTERVAL_S, still(600, 2))},
            False,
        ),
        Case("checkpoint_too_old", "of twelve seconds one was missed", aged(36, took_s=0.2), True),
        Case("checkpoint_too_old", "it takes a while to be written", aged(36, took_s=15), False),
        Case("checkpoint_too_old", "none was written yet, and the first one may be large", aged(50), False),
        Case("checkpoint_too_old", "none is ever written", aged(56), True),
        Case("recorder_spooling", "for a minute", of(live.RECORDER_SPOOLED_POINTS, still(40, 12)), True),
        Case("recorder_spooling", "for a moment", of(live.RECORDER_SPOOLED_POINTS, [0, 40, 40, 0]), False),
    ]


def _gpus() -> list[Case]:
    trains = {**of(live.LAST_STEP_TIMESTAMP_S, steps_end(130), "0")}
    hot = [1e9 * EVERY_S * 0.5 * number for number in range(70)]

    def dcgm(name: str, points: Points) -> Series:
        return of(name, points, "gpu 0")

    def alone(rule: str, what: str, series: Series, fires: bool) -> Case:
        return Case(rule, what, series, fires, GPU if fires else {}, is_judged=False)

    return [
        Case(
            "gpu_idle",
            "a tenth busy",
            {**trains, **dcgm(gpu_rules.ACTIVE, still(0.1, 130))},
            True,
            {**GPU, "node": "here"},
        ),
        Case("gpu_idle", "busy", {**trains, **dcgm(gpu_rules.ACTIVE, still(0.9, 130))}, False),
        alone("gpu_idle", "nobody trains there", dcgm(gpu_rules.ACTIVE, still(0.0, 130)), False),
        alone("gpu_throttled", "half of the time", dcgm(gpu_rules.THROTTLED[1], hot), True),
        alone("gpu_throttled", "never", dcgm(gpu_rules.THROTTLED[1], still(5e9, 70)), False),
        alone("gpu_ecc", "one more", dcgm(gpu_rules.ECC[0], [*still(2, 10), *still(3, 10)]), True),
        alone("gpu_ecc", "an old one", dcgm(gpu_rules.ECC[0], still(2, 20)), False),
        alone("gpu_xid", "79", dcgm(gpu_rules.XID, [0, 0, 79]), True),
        alone("gpu_xid", "31, of the application", dcgm(gpu_rules.XID, [0, 0, 31]), False),
    ]


CASES = (*_course(), *_speed(), *_learning(), *_upkeep(), *_gpus())
