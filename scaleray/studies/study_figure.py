"""Figures of a scaling study."""

import math
from typing import Any

from scaleray.recording.study_values import thinned
from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, INK, MUTED, ORANGE, PALE, VERMILION, Drawing, draw
from scaleray.records.study_record import Curve, StudyRecord
from scaleray.records.text.units import seconds
from scaleray.studies.speedup_figure import efficiency, marks_by_size, speedup, workers_text

PARTS = (
    ("compute_s", "compute", BLUE),
    ("exposed_comm_s", "waits for communication", VERMILION),
    ("input_wait_s", "waits for input", ORANGE),
    ("other_s", "other", PALE),
)
MOST_LINES = 8
MOST_DOTS = 400
"""Maximum number of dots in a figure of single steps."""


def study_drawings(record: StudyRecord, curve: Curve) -> list[Drawing]:
    """All available figures of one mode."""
    made = [speedup(curve), efficiency(curve), time_parts(curve), step_times(curve)]
    if any(at.point.cost_per_million_samples is not None for at in curve.points):
        made.append(cost(record, curve))
    if any(at.point.to_target and at.point.to_target.curve for at in curve.points):
        made += [convergence(curve, "samples"), convergence(curve, "time")]
    return made


def time_parts(curve: Curve) -> Drawing:
    """Stacked parts of a step at each point, as shares of the step."""
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
                    ax.text(
                        bar.get_x() + bar.get_width() / 2,
                        low + share / 2,
                        f"{share:.0f}%",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if colour in (BLUE, VERMILION) else INK,
                    )
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

    caption = "Parts of an optimizer step, measured by the workers. The median step time is above each bar."
    return draw(f"time-{curve.mode}", "Where the time goes", caption, paint, marks=marks_by_size(curve))


def step_times(curve: Curve) -> Drawing:
    """Every measured step relative to the point's median, to show how steady the measurements are."""
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
    cut = f" {drawn} of {len(every)} steps are shown." if drawn < len(every) else ""
    cut += f" {over} {'step is' if over == 1 else 'steps are'} slower than the frame shows." if over else ""
    caption = f"All steps in steady state, by measurement from left to right; the line is the median.{cut}"
    return draw(f"steps-{curve.mode}", "Steadiness of the steps", caption, paint, marks=marks_by_size(curve))


def cost(record: StudyRecord, curve: Curve) -> Drawing:
    """Cost of a million samples over the number of workers."""
    priced = [at for at in curve.points if at.point.cost_per_million_samples is not None]
    values = [at.point.cost_per_million_samples or 0.0 for at in priced]
    money = record.currency or "units"

    def paint(ax: Any) -> None:
        ax.bar(range(len(priced)), values, color=BLUE, width=0.6)
        for i, value in enumerate(values):
            more = value / values[0] - 1 if i and values[0] else 0.0
            ax.annotate(
                f"{value:.3g}" + (f"  {more:+.0%}" if i else ""),
                (i, value),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8.5,
                color=INK,
            )
        ax.set_xticks(range(len(priced)), [str(at.point.workers) for at in priced])
        ax.set_ylim(0, max(values) * 1.16 or 1.0)
        drawing.plain_axis(ax.yaxis)
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="workers", ylabel=f"{money} per million samples")

    price = f" at {record.price_per_worker_hour:g} {money} per worker and hour" if record.price_per_worker_hour else ""
    caption = f"Cost of a million samples{price}, and the increase over {workers_text(priced[0].point.workers)}."
    return draw(f"cost-{curve.mode}", "Cost", caption, paint, marks=marks_by_size(curve))


def convergence(curve: Curve, against: str) -> Drawing:
    """The target metric over samples or seconds of training, with one line for each number of workers."""
    trained = [at for at in curve.points if at.point.to_target and at.point.to_target.curve]
    shown = thinned(trained, MOST_LINES)
    colours = drawing.shades(len(shown))
    column = 0 if against == "samples" else 1

    def paint(ax: Any) -> None:
        for number, (at, colour) in enumerate(zip(shown, colours, strict=True)):
            target = at.point.to_target
            assert target is not None
            few = thinned(target.curve, 200)
            x, y = [row[column] for row in few], [row[2] for row in few]
            # the first are broader, so that those below others are seen where lines coincide
            ax.plot(x, y, color=colour, linewidth=3.6 - 2.4 * number / max(1, len(shown) - 1))
            is_reached = target.is_reached
            ax.plot(
                x[-1:], y[-1:], marker="o" if is_reached else "x", markersize=7, color=colour, linestyle="", zorder=4
            )
            label = f"{at.point.workers}" + ("" if is_reached else " missed")
            ax.plot([], [], color=colour, linewidth=2.4, label=label, marker="" if is_reached else "x")
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        ax.set(
            xlabel="samples" if against == "samples" else "training time in s", ylabel=shown[0].point.to_target.metric
        )
        drawing.legend_right(ax, "workers")

    left = f" {len(shown)} of {len(trained)} are shown." if len(shown) < len(trained) else ""
    words = (
        "It shows whether faster steps come at the cost of learning."
        if against == "time"
        else "Sizes that need the same samples lie on one line."
    )
    return draw(
        f"convergence-{against}-{curve.mode}",
        f"Training to the target, against {against}",
        f"One line for each number of workers; a cross marks an end without the target. {words}{left}",
        paint,
        marks=marks_by_size(curve),
    )


def noise_scale(record: StudyRecord) -> Drawing:
    """The gradient noise scale over the training."""
    few = thinned(record.noise, 400)

    batch = next((at.point.global_batch_size for curve in record.curves for at in curve.points), None)

    def paint(ax: Any) -> None:
        ax.plot([samples for samples, _ in few], [value for _, value in few], color=BLUE)
        drawing.plain_axis(ax.xaxis)
        ends = [(few[-1][0], few[-1][1], drawing.number(few[-1][1]), BLUE)]
        if min(value for _, value in few) > 0:
            drawing.log_axis(ax.yaxis)
            if batch is not None:
                ax.axhline(batch, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
                ends.append((few[-1][0], float(batch), f"batch {batch}", MUTED))
                drawing.log_axis(ax.yaxis)
        ax.set(xlabel="samples trained on", ylabel="noise scale in samples")
        drawing.label_ends(ax, ends)

    caption = (
        "Near this batch size, larger batches begin to need more samples; well below it, they need none. "
        "Dashed: the batch size of the smallest point."
    )
    return draw("noise-scale", "Gradient noise scale", caption, paint, marks=record.marks)
