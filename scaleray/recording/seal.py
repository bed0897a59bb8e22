"""The SHA-256 of measurements, stored next to them, which reveals a later change of a number.

MLflow lets every user with access log another value of a metric, and shows the last one. A seal covers the params and
last metric values of one run, as they were written together. It is not a signature."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from scaleray.common import metric_names as names
from scaleray.records.chart_points import Point
from scaleray.records.experiment import SEAL

MEASURED, RELATIVE = f"{SEAL}measured", f"{SEAL}relative"
"""Tags of a point: seals of its measurements, and of its values relative to the base of its curve."""
OF_CURVE = (names.POINT_SPEEDUP.name, names.POINT_EFFICIENCY.name)
"""Metrics that are known only after the point, when the curve is complete."""


def seals(points: Iterable[Point], params: Mapping[str, Any]) -> dict[str, str]:
    """The seal tags for values about to be written to one run."""
    last = last_values(points)
    found = {MEASURED: seal(last, params)} if params else {}
    relative = {name: value for name, value in last.items() if name in OF_CURVE}
    return {**found, **({RELATIVE: seal(relative, {})} if relative else {})}


def seal(metrics: Mapping[str, float], params: Mapping[str, Any]) -> str:
    """SHA-256 of metrics by name and params, except those of `OF_CURVE`."""
    kept = {name: float(value) for name, value in metrics.items() if not params or name not in OF_CURVE}
    text = json.dumps([kept, {name: str(value) for name, value in params.items()}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def last_values(points: Iterable[Point]) -> dict[str, float]:
    """The value that MLflow shows of each metric: the last one at the largest step."""
    found: dict[str, tuple[int, float]] = {}
    for name, value, _, step in points:
        if name not in found or step >= found[name][0]:
            found[name] = (step, value)
    return {name: value for name, (_, value) in found.items()}


def problem_of(tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float]) -> str | None:
    """Difference between a run's numbers and the sealed ones; None if there is none, or if they were never sealed."""
    if MEASURED in tags and tags[MEASURED] != seal(metrics, params):
        return "its params or metrics are not those that were measured"
    relative = {name: value for name, value in metrics.items() if name in OF_CURVE}
    if RELATIVE in tags and tags[RELATIVE] != seal(relative, {}):
        return "its efficiency or speed-up is not the study's result"
    return None
