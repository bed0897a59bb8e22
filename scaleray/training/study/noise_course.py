"""The noise scale of a rung of a ladder: over the first steps of its training, apart from the turns that are timed.

Turns measure no noise: a measurement costs a part of a step, and a worker that does its share alone would measure by
another method than the group. A training to the target measures as its config says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from scaleray.data import Sources
from scaleray.records.run import Say
from scaleray.records.study import NoiseCourse
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place
from scaleray.training.study.turn import emit_to, shortened


def measure_noise(job: TrainJob, place: Place, *, num_steps: int, sources: Sources, say: Say) -> NoiseCourse | None:
    """Train the first `num_steps` steps and measure the noise scale in each. Collective; rank 0's result is the
    group's.

    The result is None where the training does not measure noise.
    """
    noise = job.config.noise_scale.model_copy(update={"every_steps": 1})  # nobody counts the time
    short = shortened(job, num_steps)
    short = dataclasses.replace(short, config=short.config.model_copy(update={"noise_scale": noise}))
    summary = loop.run(short, place, sources=sources, emit=emit_to([], say, place))
    return course_of(summary.noise, covers="its first steps")


def course_of(noise: Mapping[str, Any], *, covers: str) -> NoiseCourse | None:
    """Course of the noise that a worker has measured (`WorkerSummary.noise`); None where that is empty. covers:
    see `NoiseCourse.covers`."""
    if not noise:
        return None
    low, high = noise["low"], noise["high"]
    return NoiseCourse(
        scale=_finite(noise["scale"]),
        interval=None if low is None or not math.isfinite(low) else (low, _finite(high)),
        way=noise["way"],
        num_measurements=noise["num_measurements"],
        covers=covers,
        curve=[(samples, value) for samples, value in noise["curve"]],
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
