"""The figures of a scaling study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from scaleray.reports import drawing
from scaleray.reports.drawing import BLUE, GRID, INK, MUTED, ORANGE, PALE, VERMILION, Drawing, draw
from scaleray.study_records import Curve, CurvePoint, Estimate, StudyRecord
from scaleray.study_tables import marks_of, seconds
from scaleray.tracking.study_values import thinned

PARTS = (
    ("compute_s", "compute", BLUE),
    ("exposed_comm_s", "waits for communication", VERMILION),
    ("input_wait_s", "waits for input", ORANGE),
    ("other_s", "other", PALE),
)
MOST_LINES = 8
MOST_DOTS = 400
"""Of a figure of single steps."""


def study_drawings(record: StudyRecord, curve: Curve) -> list[Drawing]:
    """All figures of one mode for which there are figures."""
    made = [speedup(curve), efficiency(curve), time_parts(curve), step_times(curve)]
    if any(at.point.cost_per_million_samples is not None for at in curve.points):
        made.append(cost(record, curve))
    if any(at.point.to_target and at.point.to_target.curve for at in curve.points):
        made += [convergence(curve, "samples"), convergence(curve, "time")]
    return made


def speedup(curve: Curve) -> Drawing:
    """Speed-up over the number of workers, on two logarithmic axes, with the ideal line and the fitted law's band."""
    fit = next((fit for fit in curve.fits if fit.law == curve.best_law and fit.band), None)
    workers = [at.point.workers for at in curve.points]
    next_one = curve.next_doubling
    last = max([*workers, *([next_one.workers] if next_one else [])])
    measured = [at.speedup for at in curve.points]
    values = [curve.base_workers, last, *(e.value for e in measured)]
    # an interval that says nothing must not press the curve flat
    bottom = max(min(values) / 2.5, min([min(values) / 1.45, *(e.low / 1.1 for e in measured)]))
    top = min(max(values) * 2, max([max(values) * 1.2, *(e.high * 1.1 for e in measured)]))

    def paint(ax: Any) -> None:
        drawing.log2_axis(ax.xaxis, [*workers, *([next_one.workers] if next_one else [])])
        drawing.log2_axis(ax.yaxis, _powers(curve.base_workers, last))
        ends = [(float(last), float(last), "ideal", MUTED)]
        ax.plot(
            [curve.base_workers, last], [curve.base_workers, last], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2
        )
        if fit:
            x = [n for n, _ in fit.band if n <= last]
            band = [e for n, e in fit.band if n <= last]
            within = [_clipped(e, bottom / 2, top * 2) for e in band]
            ax.fill_between(x, [e.low for e in within], [e.high for e in within], color=BLUE, alpha=0.16, linewidth=0)
            inside = [n for n in x if n <= max(workers)]
            ax.plot(inside, [e.value for e in band[: len(inside)]], color=BLUE, alpha=0.75)
            ax.plot(
                x[len(inside) - 1 :],
                [e.value for e in band[len(inside) - 1 :]],
                color=BLUE,
                alpha=0.75,
                linestyle=(0, (2, 2)),
            )
            if band:
                ends.append((x[-1], band[-1].value, f"{fit.law} fit", BLUE))
        _points(ax, curve.points, [_clipped(e, bottom / 2, top * 2) for e in measured], BLUE)
        if next_one and curve.points:
            here = curve.points[-1].speedup.value * next_one.gain.value
            ax.plot(
                [next_one.workers],
                [here],
                marker="D",
                markerfacecolor="white",
                markeredgecolor=BLUE,
                markersize=6.5,
                zorder=4,
            )
        _labels(ax, curve.points, measured, lambda v: f"{v:.3g}×", is_below=True)
        ax.set_ylim(bottom, top)
        ax.set(xlabel="workers", ylabel="speed-up")
        _room(ax, workers, last)
        drawing.label_ends(ax, ends)

    law = f" Line and band: the {fit.law} law with its 95% interval, dashed beyond what was measured." if fit else ""
    hollow = " Diamond: the next doubling." if next_one else ""
    wide = _leaving(measured, bottom, top)
    caption = f"{_what(curve)} relative to {_workers(curve.base_workers)}; bars are 95% intervals.{wide}{law}{hollow}"
    return draw(f"speedup-{curve.mode}", "Speed-up", caption, paint, marks=_marks(curve))


def efficiency(curve: Curve) -> Drawing:
    """Efficiency over the number of workers."""
    workers = [at.point.workers for at in curve.points]
    values = [_times(at.efficiency, 100) for at in curve.points]
    least, most = min(v.value for v in values), max([100.0, *(v.value for v in values)])
    low = max(least - 45, min(v.low for v in values), 0.0)
    bottom = 0.0 if low < 45 else min(75.0, low - 12)
    top = 7 + min(most + 45, max([100.0, *(v.high for v in values)]))

    def paint(ax: Any) -> None:
        drawing.log2_axis(ax.xaxis, workers)
        ax.plot([min(workers), max(workers)], [100, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
        ax.plot(workers, [v.value for v in values], color=BLUE, alpha=0.75)
        _points(ax, curve.points, values, BLUE)
        ax.set_ylim(bottom, top)
        drawing.plain_axis(ax.yaxis, show=lambda v: f"{v:.0f}%")
        _labels(ax, curve.points, values, lambda v: f"{v:.0f}%", is_below=False)
        ax.set(xlabel="workers", ylabel=f"{curve.mode} efficiency")
        _room(ax, workers, max(workers))
        drawing.label_ends(ax, [(max(workers), 100.0, "ideal", MUTED)])

    meaning = (
        "The same work by n workers in 1/n of the time is 100%."
        if curve.mode == "strong"
        else "n times the work by n workers in the same time is 100%."
    )
    return draw(
        f"efficiency-{curve.mode}",
        "Efficiency",
        f"{meaning} Bars are 95% intervals.{_leaving(values, bottom, top)}",
        paint,
        marks=_marks(curve),
    )


def time_parts(curve: Curve) -> Drawing:
    """What a step of each point is made of, as shares of it, stacked."""
    points = [at.point for at in curve.points]

    def paint(ax: Any) -> None:
        bottom = [0.0] * len(points)
        for name, label, colour in PARTS:
            shares = [100 * (getattr(p, name) or 0.0) / (p.step_time_s.value or 1.0) for p in points]
            if not any(share > 0.05 for share in shares):
                continue
            bars = ax.bar(
                range(len(points)),
                shares,
                bottom=bottom,
                color=colour,
                width=0.66,
                label=label,
                edgecolor="white",
                linewidth=0.8,
            )
            for bar, share, low in zip(bars, shares, bottom, strict=True):
                if share >= 9 and len(points) < 9:
                    ax.text(bar.get_x() + bar.get_width() / 2, low + share / 2, f"{share:.0f}%", ha="center", va="center", fontsize=8,
                            color="white" if colour in (BLUE, VERMILION) else INK)  # fmt: skip
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        for i, (p, top) in enumerate(zip(points, bottom, strict=True)):
            raised = 6 if len(points) > 7 and i % 2 else 0  # neighbours' words would touch
            ax.text(
                i,
                top + 2 + raised,
                seconds(p.step_time_s.value),
                ha="center",
                va="bottom",
                fontsize=8.5 if len(points) < 8 else 7.5,
            )
        ax.set_xticks(range(len(points)), [str(p.workers) for p in points])
        ax.set_ylim(0, max([100.0, *bottom]) * (1.1 if len(points) < 8 else 1.16))
        ax.set_yticks([0, 25, 50, 75, 100], ["0", "25%", "50%", "75%", "100%"])
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="workers", ylabel="share of a step")
        ax.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=4,
            columnspacing=1.2,
            handlelength=0.9,
            handleheight=0.9,
            handletextpad=0.5,
        )

    caption = "Parts of an optimizer step as the workers measured them; above each bar the step's median time."
    return draw(f"time-{curve.mode}", "Where the time goes", caption, paint, marks=_marks(curve))


def step_times(curve: Curve) -> Drawing:
    """Every measured step relative to the point's median, so that a reader sees how steady the figures are."""
    points = [at.point for at in curve.points]
    most = max(2, MOST_DOTS // max(1, sum(len(p.turns) for p in points)))
    relative = [[[100 * t / (p.step_time_s.value or 1.0) for t in turn] for turn in p.turns] for p in points]
    every = sorted(t for turns in relative for turn in turns for t in turn)
    # a few hiccups must not flatten all others
    top = max(112.0, 1.15 * every[max(0, math.ceil(0.98 * len(every)) - 1)]) if every else 112.0
    low = min(90.0, every[0] - 3) if every else 90.0

    def paint(ax: Any) -> None:
        for place, (p, turns) in enumerate(zip(points, relative, strict=True)):
            for k, turn in enumerate(turns):
                middle = place + (0.0 if len(turns) == 1 else (k / (len(turns) - 1) - 0.5) * 0.62)
                few = [t for t in thinned(turn, most) if t <= top]
                across = [middle + 0.05 * ((7 * j) % 5 - 2) / 2 for j in range(len(few))]
                ax.plot(across, few, linestyle="", marker="o", markersize=2.6, color=BLUE, alpha=0.4, markeredgewidth=0)
            ax.plot([place - 0.4, place + 0.4], [100, 100], color=VERMILION, linewidth=1.4, zorder=4)
            ax.text(
                place,
                1.0,
                seconds(p.step_time_s.value),
                ha="center",
                va="bottom",
                fontsize=8.5,
                transform=ax.get_xaxis_transform(),
            )
        ax.set_xticks(range(len(points)), [str(p.workers) for p in points])
        ax.set_xlim(-0.6, len(points) - 0.4)
        ax.set_ylim(low, top)
        ax.grid(axis="x", visible=False)
        drawing.plain_axis(ax.yaxis, show=lambda v: f"{v:.0f}%")
        ax.set(xlabel="workers", ylabel="step time, of the median")

    drawn = sum(min(len(turn), most) for p in points for turn in p.turns)
    over = sum(t > top for t in every)
    cut = f" {drawn} of {len(every)} steps are drawn." if drawn < len(every) else ""
    cut += f" {over} {'step is' if over == 1 else 'steps are'} slower than the frame shows." if over else ""
    caption = f"Each step in steady state, turn by turn from left to right; the line is the median.{cut}"
    return draw(f"steps-{curve.mode}", "How steady the steps are", caption, paint, marks=_marks(curve))


def cost(record: StudyRecord, curve: Curve) -> Drawing:
    """Price of a million samples over the number of workers."""
    priced = [at for at in curve.points if at.point.cost_per_million_samples is not None]
    values = [at.point.cost_per_million_samples or 0.0 for at in priced]
    money = record.currency or "units"

    def paint(ax: Any) -> None:
        ax.bar(range(len(priced)), values, color=BLUE, width=0.6)
        for i, value in enumerate(values):
            more = value / values[0] - 1 if i and values[0] else 0.0
            ax.annotate(f"{value:.3g}" + (f"  {more:+.0%}" if i else ""), (i, value), xytext=(0, 3), textcoords="offset points",
                        ha="center", va="bottom", fontsize=8.5, color=INK)  # fmt: skip
        ax.set_xticks(range(len(priced)), [str(at.point.workers) for at in priced])
        ax.set_ylim(0, max(values) * 1.16 or 1.0)
        drawing.plain_axis(ax.yaxis)
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="workers", ylabel=f"{money} per million samples")

    price = (
        f" at {record.price_per_worker_hour:g} {money} for a worker and hour" if record.price_per_worker_hour else ""
    )
    caption = f"What a million samples cost{price}, and how much more than with {_workers(priced[0].point.workers)}."
    return draw(f"cost-{curve.mode}", "Cost", caption, paint, marks=_marks(curve))


def convergence(curve: Curve, against: str) -> Drawing:
    """The target's metric over samples or over seconds of training, a line for each number of workers."""
    trained = [at for at in curve.points if at.point.to_target and at.point.to_target.curve]
    shown = thinned(trained, MOST_LINES)
    colours = drawing.shades(len(shown))
    column = 0 if against == "samples" else 1

    def paint(ax: Any) -> None:
        ends = []
        for at, colour in zip(shown, colours, strict=True):
            target = at.point.to_target
            assert target is not None
            few = thinned(target.curve, 200)
            x, y = [row[column] for row in few], [row[2] for row in few]
            ax.plot(x, y, color=colour)
            ax.plot(x[-1:], y[-1:], marker="o" if target.is_reached else "x", color=colour, linestyle="")
            ends.append((x[-1], y[-1], f"{at.point.workers} " + ("" if target.is_reached else "missed"), colour))
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        ax.set(
            xlabel="samples" if against == "samples" else "seconds of training", ylabel=shown[0].point.to_target.metric
        )
        drawing.label_ends(ax, ends)

    left = f" {len(shown)} of {len(trained)} are drawn." if len(shown) < len(trained) else ""
    words = (
        "Faster steps that learn less show here."
        if against == "time"
        else "Numbers of workers that need the same samples lie on one line."
    )
    return draw(
        f"convergence-{against}-{curve.mode}", f"Training to the target, against {against}",
        f"A line for each number of workers, named at its end. {words}{left}", paint, marks=_marks(curve),
    )  # fmt: skip


def noise_scale(record: StudyRecord) -> Drawing:
    """The gradient noise scale over the training."""
    few = thinned(record.noise, 400)

    def paint(ax: Any) -> None:
        ax.plot([samples for samples, _ in few], [value for _, value in few], color=BLUE)
        drawing.plain_axis(ax.xaxis)
        if min(value for _, value in few) > 0:
            drawing.log_axis(ax.yaxis)
        ax.set(xlabel="samples", ylabel="noise scale in samples")
        drawing.label_ends(ax, [(few[-1][0], few[-1][1], drawing.number(few[-1][1]), BLUE)])

    caption = (
        "Near this batch size a larger one begins to need more samples; well below it, more data in a step costs none."
    )
    return draw("noise-scale", "Gradient noise scale", caption, paint, marks=record.marks)


def _points(ax: Any, points: Sequence[CurvePoint], values: Sequence[Estimate], colour: str) -> None:
    for at, value in zip(points, values, strict=True):
        ax.errorbar(
            [at.point.workers], [value.value], yerr=[[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]],
            fmt="o", color=colour, capsize=2.5, elinewidth=1.1, zorder=3,
            markerfacecolor="white" if at.point.reused_from else colour, markeredgecolor=colour,
        )  # fmt: skip


def _labels(
    ax: Any, points: Sequence[CurvePoint], values: Sequence[Estimate], show: Callable[[float], str], *, is_below: bool
) -> None:
    """Each value at the right of its point: below a rising line, above a falling one, where there is room."""
    for at, value in zip(points, values, strict=True):
        ax.annotate(
            show(value.value), (at.point.workers, value.value), xytext=(6, -4 if is_below else 4), textcoords="offset points", ha="left",
            va="top" if is_below else "bottom", fontsize=8.5, color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6},
        )  # fmt: skip


def _clipped(estimate: Estimate, low: float, high: float) -> Estimate:
    """The interval's part that a logarithmic axis can hold."""
    return Estimate(estimate.value, min(max(estimate.low, low), high), max(low, min(estimate.high, high)))


def _leaving(values: Sequence[Estimate], bottom: float, top: float) -> str:
    """A word about intervals that are not drawn to their ends."""
    return " Bars that touch the frame go on." if any(v.low < bottom or v.high > top for v in values) else ""


def _room(ax: Any, workers: Sequence[int], last: int) -> None:
    """Space beside the first and the last point on a logarithmic axis."""
    ax.set_xlim(min(workers) / 1.22, last * 1.12)
    ax.grid(color=GRID)


def _powers(first: int, last: int) -> list[float]:
    found = [float(first)]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def _what(curve: Curve) -> str:
    return (
        "Throughput of a fixed global batch"
        if curve.mode == "strong"
        else "Throughput with a fixed batch for each worker"
    )


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _marks(curve: Curve) -> list[str]:
    """Each mark with the numbers of workers that it is true of."""
    found: dict[str, list[str]] = {}
    for at in curve.points:
        for mark in marks_of(at):
            found.setdefault(mark, []).append(str(at.point.workers))
    everywhere = len(curve.points)
    return [mark if len(sizes) == everywhere else f"{mark}: {', '.join(sizes)}" for mark, sizes in found.items()]
