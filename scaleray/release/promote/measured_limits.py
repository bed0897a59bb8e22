"""Limits of alerts for a training, from the measurements of its runs: usual values raise no alert, but far larger ones
do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.learning_rules import IN_A_ROW, LEAST_POINTS, LOOK_BACK, mads_above, over_median
from scaleray.live.rules.series_history import Values
from scaleray.live.steps_file import step_rows
from scaleray.recording.find_record import FoundRun
from scaleray.release.gate.evidence import training

FACTOR = 2.0
"""Factor between the largest measurement and a limit."""
MOST_CHECKS = 2000
"""Most steps of a run, evenly spread, at which its losses and gradients are compared with earlier ones."""
SLOWER = 0.8
"""Share of the slowest run's samples per second below which a later run is slower than the promoted ones."""


@dataclass(frozen=True)
class MeasuredLimits:
    """Limits, and a line for each that was measured. samples_per_s: of the slowest run; None if none was steady."""

    limits: AlertLimits
    lines: tuple[str, ...]
    samples_per_s: float | None


def measured_limits(runs: Sequence[FoundRun]) -> MeasuredLimits:
    """Limits from these runs. Quantities without measurements keep the default limit."""
    usual, records = AlertLimits(), [training(run) for run in runs]
    rows = [step_rows(run.steps) for run in runs]
    times, losses, norms = (
        [np.array([row[name] for row in one if row.get(name) is not None]) for one in rows]
        for name in ("step_time_s", "loss", "grad_norm")
    )
    waits = [record.input_wait_share for record in records if record.input_wait_share is not None]
    shares = [
        peak / part["device_bytes"]
        for record in records
        for peak, part in zip(record.peak_memory_bytes, record.memory, strict=False)
        if part.get("device_bytes")
    ]
    measured = {
        "no_progress_s": max((float(one.max()) for one in times if len(one)), default=None),
        "input_wait_share": max(waits, default=None),
        "loss_spike_mads": _largest(losses, mads_above),
        "gradient_factor": _largest(norms, over_median),
        "memory_share": max(shares, default=None),
    }
    found: dict[str, float] = {}
    lines = []
    for name, value in measured.items():
        if value is None:
            continue
        found[name] = _limit(name, value, float(getattr(usual, name)))
        lines.append(f"{name}: {found[name]:.4g}; the largest measured value was {value:.4g}")
    speeds = [record.samples_per_s for record in records if record.samples_per_s]
    return MeasuredLimits(usual.model_copy(update=found), tuple(lines), min(speeds, default=None))


def _limit(name: str, value: float, usual: float) -> float:
    """A limit above the measurements, at least half of the default: otherwise a calm run would get a tight limit."""
    if name == "memory_share":  # half of what is left
        return round(min(0.99, (1 + value) / 2), 4)
    limit = max(FACTOR * value, usual / 2)
    return float(f"{min(limit, 0.9) if name == 'input_wait_share' else limit:.3g}")


def _largest(series: Sequence[Values], measure: Callable[[Values, Values], Values]) -> float | None:
    """The highest level reached by a streak of values as long as an alert needs, in any run; None if all runs are too
    short."""
    found = [one for values in series for one in _in_a_row(values[np.isfinite(values)], measure)]
    return max(found, default=None)


def _in_a_row(values: Values, measure: Callable[[Values, Values], Values]) -> list[float]:
    last = len(values) - IN_A_ROW
    looks = range(LEAST_POINTS, last + 1, max(1, last // MOST_CHECKS))
    return [float(measure(values[at : at + IN_A_ROW], values[max(0, at - LOOK_BACK) : at]).min()) for at in looks]
