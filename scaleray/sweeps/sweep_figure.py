"""Figures of a sweep. Large numbers of trials are thinned to stay readable, and the caption states it."""

import math
from collections.abc import Sequence
from typing import Any

from scaleray.recording.study_values import thinned
from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, GREEN, MUTED, Drawing, draw
from scaleray.records.settings import Setting, best_by_batch, trained
from scaleray.records.sweep_record import GoodputPoint, SweepRecord, Trial
from scaleray.records.text.units import seconds
from scaleray.sweeps.sweep_maps import MOST_MARKS, maps

MOST_LINES = 60
"""Maximum number of curves in one figure."""
MOST_CURVE_POINTS = 60
"""Maximum number of evaluations in one line."""
MOST_BESIDE = 3.0
"""Factor by which the frame of noise scales extends beyond the measured values, however wide their intervals."""
MOST_ARROWS = 60
"""Maximum number of trials in a figure for which an interval beyond the frame ends in an arrow."""


def sweep_drawings(record: SweepRecord) -> list[Drawing]:
    """All figures for which the record has data."""
    with_curve = [t for t in trained(record) if t.curve]
    by_batch = best_by_batch(record)
    made = maps(record)
    if any(s.samples_to_target is not None for batches in by_batch.values() for s in batches.values()):
        made += [to_target(record, "samples"), to_target(record, "time")]
    if with_curve:
        made += [curves(record, "samples"), curves(record, "time")]
    if record.goodput:
        made.append(goodput(record))
    if any((t.noise_scale or t.noise_interval) and t.samples for t in record.trials):
        made.append(noise(record))
    return made


def to_target(record: SweepRecord, what: str) -> Drawing:
    """Samples or seconds to the target over the batch size, one line for each rule."""
    by_batch = best_by_batch(record)
    colours = drawing.colours_of(list(by_batch))
    batches = sorted({b for found in by_batch.values() for b in found})

    def value(setting: Setting) -> float | None:
        return setting.samples_to_target if what == "samples" else setting.time_to_target_s

    def paint(ax: Any) -> None:
        ends = []
        for rule, found in by_batch.items():
            rows = [(b, v) for b, s in found.items() if (v := value(s)) is not None]
            if not rows:
                continue
            for b, s in found.items():
                each = [t.samples_to_target if what == "samples" else t.time_to_target_s for t in s.trials]
                seen = [v for v in each if v is not None]
                ax.plot(
                    [b] * len(seen),
                    seen,
                    linestyle="",
                    marker="o",
                    markersize=3,
                    color=colours[rule],
                    alpha=0.35,
                    markeredgewidth=0,
                )
            ax.plot([b for b, _ in rows], [v for _, v in rows], color=colours[rule], marker="o")
            ends.append((*rows[-1], rule, colours[rule]))
        drawing.log2_axis(ax.xaxis, batches)
        drawing.log_axis(ax.yaxis, show=seconds if what == "time" else None)
        ax.set(xlabel="batch size", ylabel="samples to target" if what == "samples" else "training time to target")
        drawing.label_ends(ax, ends)

    reading = (
        "Where a line rises, larger batches need more samples for the same result."
        if what == "samples"
        else "The lowest point is the fastest batch size."
    )
    meeting = sorted({b for found in by_batch.values() for b, s in found.items() if s.one_training_with})
    shared = f" At batch {', '.join(map(str, meeting))} rules give one training, which ran once." if meeting else ""
    caption = (
        f"The best learning rate of each rule at each batch size; small dots are single seeds. {reading}{shared} A "
        f"line ends where the target is missed."
    )
    return draw(f"target-{what}", f"{what.capitalize()} to target", caption, paint, marks=record.marks)


def curves(record: SweepRecord, against: str) -> Drawing:
    """The metric over samples or seconds, coloured by batch size; the best trial of each rule and batch size first."""
    with_curve = [t for t in trained(record) if t.curve]
    chosen = _chosen(record, with_curve)
    batches = sorted({t.batch_size for t in chosen})
    shade = dict(zip(batches, drawing.shades(len(batches)), strict=True))
    column = 0 if against == "samples" else 1

    def paint(ax: Any) -> None:
        for t in chosen:
            few = [row for row in thinned(t.curve, MOST_CURVE_POINTS) if math.isfinite(row[2])]
            ax.plot(
                [row[column] for row in few],
                [row[2] for row in few],
                color=shade[t.batch_size],
                linewidth=1.2,
                alpha=0.8,
                marker="o" if len(few) == 1 else None,  # a trial with a single evaluation has no line
            )
        values = [row[2] for t in chosen for row in t.curve if math.isfinite(row[2])]
        if values and min(values) > 0 and max(values) / min(values) > 20:
            drawing.log_axis(ax.yaxis)
        else:
            drawing.plain_axis(ax.yaxis)
        if all(row[column] > 0 for t in chosen for row in t.curve[:1]):
            drawing.log_axis(ax.xaxis, show=seconds if against == "time" else None)
        else:
            drawing.plain_axis(ax.xaxis)
        ax.set(xlabel="samples" if against == "samples" else "training time", ylabel=record.metric)
        for batch in batches:
            ax.plot([], [], color=shade[batch], label=str(batch), linewidth=2.4)
        drawing.legend_right(ax, "batch size")

    left = (
        f" {len(chosen)} of {len(with_curve)} trials are drawn: the best of each rule and batch size, then an even "
        f"selection."
        if len(chosen) < len(with_curve)
        else ""
    )
    return draw(
        f"curves-{against}",
        f"{record.metric} against {against}",
        f"One line per trial, coloured by batch size.{left}",
        paint,
        marks=record.marks,
    )


def goodput(record: SweepRecord) -> Drawing:
    """Throughput, statistical efficiency and their product over the batch size, each relative to its largest value."""
    points = sorted(record.goodput, key=lambda p: p.batch_size)
    batches = [p.batch_size for p in points]
    lines = (
        ("throughput", MUTED, "samples_per_s"),
        ("efficiency", GREEN, "statistical_efficiency"),
        ("goodput", BLUE, "goodput"),
    )
    best = max(points, key=lambda p: p.goodput.value)

    def paint(ax: Any) -> None:
        ends = []
        for label, colour, name in lines:
            last = _goodput_line(ax, points, name, colour=colour)
            ends.append((batches[-1], last, label, colour))
        drawing.log2_axis(ax.xaxis, batches)
        ax.set_ylim(0, 112)
        drawing.plain_axis(ax.yaxis, show=lambda v: f"{v:.0f}%")
        ax.annotate(
            f"best: {best.batch_size}",
            (best.batch_size, 100),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=BLUE,
            fontweight="bold",
        )
        ax.set(xlabel="batch size", ylabel="share of the largest")
        drawing.label_ends(ax, ends)

    unsure = (
        " Cross: more than a factor of 4 from a measured batch size; do not rely on it."
        if not all(p.is_trusted for p in points)
        else ""
    )
    caption = (
        "Goodput is throughput times statistical efficiency. "
        f"Dot: measured; diamond: predicted.{unsure} Bands are 95% intervals."
    )
    return draw("goodput", "Goodput", caption, paint, marks=record.marks)


def _goodput_line(ax: Any, points: Sequence[GoodputPoint], name: str, *, colour: str) -> float:
    """Draw one quantity of all points with its band, in percent of its largest value; return where the line ends."""
    batches = [p.batch_size for p in points]
    estimates = [getattr(p, name) for p in points]
    most = max((e.value for e in estimates), default=1.0) or 1.0
    ax.fill_between(
        batches,
        [100 * e.low / most for e in estimates],
        [100 * e.high / most for e in estimates],
        color=colour,
        alpha=0.13,
        linewidth=0,
    )
    values = [100 * e.value / most for e in estimates]
    ax.plot(batches, values, color=colour, linewidth=2.4 if name == "goodput" else 1.4)
    for p, v in zip(points, values, strict=True):
        ax.plot(
            [p.batch_size],
            [v],
            marker="o" if p.is_measured else "D" if p.is_trusted else "x",
            color=colour,
            markerfacecolor=colour if p.is_measured else "white",
            markersize=5 if p.is_measured else 4,
        )
    return values[-1]


def noise(record: SweepRecord) -> Drawing:
    """Noise scale of each trial with its interval, over the number of samples trained on."""
    measured = [t for t in trained(record) if (t.noise_scale or t.noise_interval) and t.samples]
    shown = thinned(measured, MOST_MARKS // 3)
    batches = sorted({t.batch_size for t in shown})
    shade = dict(zip(batches, drawing.shades(len(batches)), strict=True))
    values = [v for t in shown if (v := t.noise_scale or (t.noise_interval or (0.0,))[0]) > 0] or [1.0]
    ends = [end for t in shown for end in t.noise_interval or () if end is not None and end > 0]
    low = max(min(values) / MOST_BESIDE, min([min(values) / 1.2, *(e / 1.1 for e in ends)]))
    high = min(max(values) * MOST_BESIDE, max([max(values) * 1.2, *(e * 1.1 for e in ends)]))

    def paint(ax: Any) -> None:
        for t in shown:
            if t.noise_interval is not None:
                _noise_bar(ax, t, low, high, colour=shade[t.batch_size], has_arrows=len(shown) <= MOST_ARROWS)
        for batch in batches:
            own = [t for t in shown if t.batch_size == batch and t.noise_scale]
            ax.scatter(
                [t.samples for t in own],
                [t.noise_scale for t in own],
                color=shade[batch],
                s=16,
                linewidths=0,
                alpha=0.85,
                label=str(batch),
                zorder=3,
            )
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        drawing.log_axis(ax.yaxis)
        drawing.log_axis(ax.xaxis)
        ax.set(xlabel="samples trained on", ylabel="noise scale in samples")
        drawing.legend_right(ax, "batch size")

    left = f" {len(shown)} of {len(measured)} trials are drawn." if len(shown) < len(measured) else ""
    bars = " Bars: 95% intervals; those that reach the frame extend beyond it." if ends else ""
    open_ = " A bar without a dot: too large to resolve." if any(not t.noise_scale for t in shown) else ""
    caption = f"One dot per trial, at its end. Batches far below the noise scale waste no samples.{bars}{open_}{left}"
    return draw("noise-scale", "Gradient noise scale", caption, paint, marks=record.marks)


def _noise_bar(ax: Any, trial: Trial, low: float, high: float, *, colour: str, has_arrows: bool) -> None:
    begin, end = trial.noise_interval or (low, high)
    bottom, top = min(max(begin, low), high), high if end is None else min(max(end, low), high)
    ax.plot([trial.samples] * 2, [bottom, top], color=colour, linewidth=1.0, alpha=0.55, zorder=2)
    if has_arrows and (end is None or end > high):
        ax.plot([trial.samples], [top], marker="^", markersize=5, color=colour, clip_on=False, zorder=3)
    if has_arrows and begin < low:
        ax.plot([trial.samples], [bottom], marker="v", markersize=5, color=colour, clip_on=False, zorder=3)


def _chosen(record: SweepRecord, with_curve: Sequence[Trial]) -> list[Trial]:
    best = [s.trials[0] for batches in best_by_batch(record).values() for s in batches.values()]
    numbers = {t.number if t.same_as is None else t.same_as for t in best}
    first = [t for t in with_curve if t.number in numbers]
    rest = [t for t in with_curve if t.number not in numbers]
    room = max(0, MOST_LINES - len(first))
    few = thinned(rest, room) if room >= 2 else rest[:room]
    return sorted([*thinned(first, MOST_LINES), *few], key=lambda t: t.batch_size)
