"""Figures of speed-up and efficiency along a study's curve, with an interval for each point and the fitted law's band.

A very wide interval or band must not flatten a curve: axes cover the values and their surroundings, longer bars end in
an arrow, and a band that would leave the frame is described in the caption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, GRID, INK, MUTED, Drawing, draw
from scaleray.records.study_record import Curve, CurvePoint, Estimate, Fit
from scaleray.records.text.study_sweep_tables import marks_of

MOST_BELOW, MOST_ABOVE = 3.0, 1.5
"""Factors by which a speed-up's frame extends below the smallest value and above the largest."""
MOST_BESIDE = 45.0
"""Percentage points by which an efficiency's frame extends beyond the values."""


@dataclass(frozen=True)
class Frame:
    """Lower and upper end of an axis."""

    low: float
    high: float

    def holds(self, estimate: Estimate) -> bool:
        """Whether both ends of an interval are within the frame."""
        return self.low <= estimate.low and estimate.high <= self.high


def speedup(curve: Curve) -> Drawing:
    """Speed-up over the number of workers, on two logarithmic axes, with the ideal line and the fitted law's band."""
    workers = [at.point.workers for at in curve.points]
    next_one = curve.next_doubling
    last = max([*workers, *([next_one.workers] if next_one else [])])
    measured = [at.speedup for at in curve.points]
    diamond = measured[-1].value * next_one.gain.value if next_one else None
    values = [float(curve.base_workers), float(last), *(e.value for e in measured), *([diamond] if diamond else [])]
    widest = Frame(min(values) / MOST_BELOW, max(values) * MOST_ABOVE)
    fit = next((fit for fit in curve.fits if fit.law == curve.best_law and fit.band and is_judged(fit)), None)
    band = [(n, e) for n, e in fit.band if n <= last] if fit else []
    has_band = all(widest.holds(e) for _, e in band)
    frame = _around(widest, values, [*measured, *(e for _, e in band if has_band)])

    def paint(ax: Any) -> None:
        drawing.log2_axis(ax.xaxis, [*workers, *([next_one.workers] if next_one else [])])
        drawing.log2_axis(ax.yaxis, _doublings(frame, curve.base_workers))
        ax.plot(
            [curve.base_workers, last], [curve.base_workers, last], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2
        )
        ends = [(float(last), float(last), "ideal", MUTED)]
        if fit and band:
            _law(ax, band, max(workers), has_band=has_band)
            ends.append((band[-1][0], band[-1][1].value, f"{fit.law} fit", BLUE))
        else:
            ax.plot(workers, [e.value for e in measured], color=BLUE, alpha=0.75)
        _points(ax, curve.points, measured, frame)
        if next_one and diamond:
            ax.plot(
                [next_one.workers],
                [diamond],
                marker="D",
                markerfacecolor="white",
                markeredgecolor=BLUE,
                markersize=6.5,
                zorder=4,
            )
        ax.set_ylim(frame.low, frame.high)
        ax.set(xlabel="workers", ylabel="speed-up")
        _room(ax, workers, last)
        ends += _labels(ax, curve.points, measured, lambda v: f"{v:.3g}×", last=last, is_below=True)
        drawing.label_ends(ax, ends)

    law = _law_text(fit, band, has_band=has_band, goes_on=bool(next_one)) if fit and band else ""
    hollow = " Diamond: the next doubling." if next_one else ""
    caption = (
        f"{_what(curve)} relative to {workers_text(curve.base_workers)}; bars are 95% intervals."
        f"{_leaving(measured, frame)}{law}{hollow}"
    )
    return draw(f"speedup-{curve.mode}", "Speed-up", caption, paint, marks=marks_by_size(curve))


def efficiency(curve: Curve) -> Drawing:
    """Efficiency over the number of workers."""
    workers = [at.point.workers for at in curve.points]
    values = [_times(at.efficiency, 100) for at in curve.points]
    least, most = min(v.value for v in values), max([100.0, *(v.value for v in values)])
    low = max(least - MOST_BESIDE, min(v.low for v in values), 0.0)
    top = min(most + MOST_BESIDE, max([100.0, *(v.high for v in values)]))
    frame = Frame(0.0 if low < 45 else min(75.0, low - 12), top + 3)

    def paint(ax: Any) -> None:
        drawing.log2_axis(ax.xaxis, workers)
        ax.plot([min(workers), max(workers)], [100, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
        ax.plot(workers, [v.value for v in values], color=BLUE, alpha=0.75)
        _points(ax, curve.points, values, frame)
        ax.set_ylim(frame.low, frame.high)
        # more than all of it is no efficiency: only what was measured there has a number
        drawing.plain_axis(ax.yaxis, show=lambda v: f"{v:.0f}%" if v <= most else "")
        ax.set(xlabel="workers", ylabel=f"{curve.mode} efficiency")
        _room(ax, workers, max(workers))
        ends = [(float(max(workers)), 100.0, "ideal", MUTED)]
        ends += _labels(ax, curve.points, values, lambda v: f"{v:.0f}%", last=max(workers), is_below=False)
        drawing.label_ends(ax, ends)

    meaning = (
        "100%: n workers do the same work in 1/n of the time."
        if curve.mode == "strong"
        else "100%: n workers do n times the work in the same time."
    )
    caption = f"{meaning} Bars are 95% intervals.{_leaving(values, frame)}"
    return draw(f"efficiency-{curve.mode}", "Efficiency", caption, paint, marks=marks_by_size(curve))


def is_judged(fit: Fit) -> bool:
    """Whether there are enough points to judge a law by points left out of its fit; any law fits fewer points."""
    return fit.held_out_error is not None


def marks_by_size(curve: Curve) -> list[str]:
    """Each mark with the numbers of workers to which it applies."""
    found: dict[str, list[str]] = {}
    for at in curve.points:
        for mark in marks_of(at):
            found.setdefault(mark, []).append(str(at.point.workers))
    everywhere = len(curve.points)
    return [mark if len(sizes) == everywhere else f"{mark}: {', '.join(sizes)}" for mark, sizes in found.items()]


def workers_text(count: int) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} worker" if count == 1 else f"{count} workers"


def _around(widest: Frame, values: Sequence[float], intervals: Sequence[Estimate]) -> Frame:
    """Frame for all values, extended for the intervals up to the `widest` frame, and by a factor of at least 1.3."""
    low = min([min(values) / 1.3, *(e.low / 1.12 for e in intervals)])
    high = max([max(values) * 1.2, *(e.high * 1.12 for e in intervals)])
    return Frame(max(low, widest.low), min(high, widest.high))


def _law(ax: Any, band: Sequence[tuple[float, Estimate]], largest: int, *, has_band: bool) -> None:
    """The law's line, dashed beyond the largest point, and its band."""
    if has_band:
        ax.fill_between(
            [n for n, _ in band],
            [e.low for _, e in band],
            [e.high for _, e in band],
            color=BLUE,
            alpha=0.16,
            linewidth=0,
        )
    inside = [(n, e.value) for n, e in band if n <= largest]
    beyond = [*inside[-1:], *((n, e.value) for n, e in band if n > largest)]
    for part, dashes in ((inside, "-"), (beyond, (0, (2, 2)))):
        if len(part) < 2:
            continue
        ax.plot([n for n, _ in part], [value for _, value in part], color=BLUE, alpha=0.75, linestyle=dashes)


def _law_text(fit: Fit, band: Sequence[tuple[float, Estimate]], *, has_band: bool, goes_on: bool) -> str:
    dashed = ", dashed beyond the measured points" if goes_on else ""
    if has_band:
        return f" Line and band: the {fit.law} law with its 95% interval{dashed}."
    low, high = min(e.low for _, e in band), max(e.high for _, e in band)
    span = (
        f"{f'{low:.2g}×' if low >= 0.01 else 'less than 0.01×'} to "
        f"{f'{high:.3g}×' if high <= 1000 else 'more than 1000×'}"
    )
    return f" Line: the {fit.law} law{dashed}; its 95% interval, {span}, is too wide to be drawn."


def _points(ax: Any, points: Sequence[CurvePoint], values: Sequence[Estimate], frame: Frame) -> None:
    """Dots with bars; an arrow if a bar extends beyond the frame."""
    for at, value in zip(points, values, strict=True):
        n, low, high = at.point.workers, max(value.low, frame.low), min(value.high, frame.high)
        if high > low:
            ax.plot([n, n], [low, high], color=BLUE, linewidth=1.1, zorder=3)
            for end, is_cut, arrow in ((low, value.low < frame.low, "v"), (high, value.high > frame.high, "^")):
                ax.plot([n], [end], marker=arrow if is_cut else "_", markersize=6, color=BLUE, zorder=3, clip_on=False)
        ax.plot(
            [n],
            [value.value],
            marker="o",
            color=BLUE,
            markerfacecolor="white" if at.point.reused_from else BLUE,
            linestyle="",
            zorder=4,
        )


def _labels(
    ax: Any,
    points: Sequence[CurvePoint],
    values: Sequence[Estimate],
    show: Callable[[float], str],
    *,
    last: int,
    is_below: bool,
) -> list[tuple[float, float, str, str]]:
    """Write each value to the right of its point: below a rising line, above a falling one. Returns the labels at the
    right edge, which must be separated from other text."""
    ends = []
    for at, value in zip(points, values, strict=True):
        if at.point.workers == last and len(points) > 1:
            ends.append((float(last), value.value, show(value.value), INK))
            continue
        ax.annotate(
            show(value.value),
            (at.point.workers, value.value),
            xytext=(6, -4 if is_below else 4),
            textcoords="offset points",
            ha="left",
            va="top" if is_below else "bottom",
            fontsize=8.5,
            color=INK,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
    return ends


def _leaving(values: Sequence[Estimate], frame: Frame) -> str:
    """Note on intervals that are not drawn to their ends."""
    return "" if all(frame.holds(value) for value in values) else " Bars with an arrow extend beyond the frame."


def _room(ax: Any, workers: Sequence[int], last: int) -> None:
    """Space before the first and after the last point on a logarithmic axis."""
    ax.set_xlim(min(workers) / 1.22, last * 1.12)
    ax.grid(color=GRID)


def _doublings(frame: Frame, base: int) -> list[float]:
    """Ticks in the frame: the base, its doublings and halves, and intermediate values if these are few."""
    powers = [base * 2.0**k for k in range(-8, 40)]
    found = [value for value in powers if frame.low <= value <= frame.high]
    between = [1.5 * value for value in powers if frame.low <= 1.5 * value <= frame.high]
    return sorted([*found, *between]) if len(found) < 3 else found


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def _what(curve: Curve) -> str:
    return (
        "Throughput of a fixed global batch"
        if curve.mode == "strong"
        else "Throughput with a fixed batch for each worker"
    )
