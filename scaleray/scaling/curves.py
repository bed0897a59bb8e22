"""A scaling curve from measured points: speed-ups with intervals, fitted laws, the next doubling, and a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scaleray.errors import UsageError
from scaleray.scaling.efficiency import curve_points
from scaleray.study_records import Curve, Mode, Point


@dataclass(frozen=True)
class GivenLaw:
    """A law from elsewhere, such as the planner's model: its shape is taken as it is, its height fitted to the points."""

    name: str
    throughput: Callable[[float], float]
    """Samples per s, in any unit, on so many workers. Above 0, for whole and other numbers."""


def as_curve(
    mode: Mode, points: Sequence[Point], *, price_per_worker_hour: float | None = None, laws: Sequence[GivenLaw] = ()
) -> Curve:
    """Everything that follows from the points of one mode: speed-ups, fits, the next doubling, what limits, a verdict.

    laws: more laws to be fitted and judged beside Amdahl's, Gustafson's and the USL. Raises UsageError for points that
    cannot stand on one curve: none, two of one size, another mode, or global batches that do not belong together.
    """
    _check(mode, points)
    found = curve_points(points)
    return Curve(mode=mode, base_workers=found[0].point.workers, points=found)


def _check(mode: Mode, points: Sequence[Point]) -> None:
    if not points:
        raise UsageError(f"the {mode} curve", "no point", "a curve needs at least one measured number of workers")
    sizes = sorted(point.workers for point in points)
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"the numbers of workers of the {mode} curve", sizes, "each may stand there once")
    if other := [point.mode for point in points if point.mode != mode]:
        raise UsageError(f"the points of the {mode} curve", other[0], f"all must be {mode}")
    base = min(points, key=lambda point: point.workers)
    for point in points:
        wanted = base.global_batch_size * (point.workers / base.workers if mode == "weak" else 1)
        if abs(point.global_batch_size - wanted) > 1e-9 * wanted:
            raise UsageError(
                f"the global batch of {point.workers} workers", point.global_batch_size,
                f"on the {mode} curve from {base.workers} with {base.global_batch_size} it must be {wanted:g}",
            )  # fmt: skip
