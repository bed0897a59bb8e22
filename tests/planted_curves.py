"""Points of a scaling curve whose truth is known: step times drawn around it, in turns that differ from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scaleray.records.study_record import Mode, Point
from scaleray.studies.curves.efficiency import median_step_time, throughput


def turns_around(
    step_time_s: float, *, seed: int, num_turns: int = 5, steps: int = 20, between: float = 0.02, within: float = 0.03
) -> list[list[float]]:
    """Log-normal step times; between and within are standard deviations of turns, and of the steps of one."""
    draw = np.random.default_rng(seed)
    means = step_time_s * np.exp(between * draw.normal(size=num_turns))
    return [[float(t) for t in mean * np.exp(within * draw.normal(size=steps))] for mean in means]


def point(
    workers: int, turns: Sequence[Sequence[float]], *, mode: Mode = "strong", batch: int = 960, **more: Any
) -> Point:
    """A point with these step times, all of it compute unless `more` says otherwise."""
    times = [list(turn) for turn in turns]
    step = median_step_time(times)
    facts: dict[str, Any] = {
        "strategy": "ddp",
        "micro_batch_size": batch // workers,
        "accumulation_steps": 1,
        "num_warmup_steps": 3,
        "compute_s": step.value,
        "exposed_comm_s": 0.0,
        "input_wait_s": 0.0,
        "measured_at": 0.0,
    }
    return Point(
        mode=mode,
        workers=workers,
        global_batch_size=batch,
        turns=times,
        step_time_s=step,
        samples_per_s=throughput(times, samples_per_step=batch),
        **{**facts, **more},
    )


def planted(
    speedup: Callable[[float], float], workers: Sequence[int], *, mode: Mode = "strong", seed: int = 0, **noise: Any
) -> list[Point]:
    """Points of a curve with this speed-up over one worker."""
    found = []
    for n in workers:
        batch = 96 * n if mode == "weak" else 960
        turns = turns_around(batch / 9600 / speedup(n), seed=1000 * seed + n, **noise)
        found.append(point(n, turns, mode=mode, batch=batch))
    return found
