"""The figures of a sweep. What a thousand trials would make unreadable is thinned, and the caption says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from scaleray.reports import drawing
from scaleray.reports.drawing import BLUE, GREEN, INK, MUTED, PALE, VERMILION, Drawing, draw
from scaleray.reports.rule_limits import ended_at, rule_limits
from scaleray.scaling.sweep_result import find_knee
from scaleray.study_records import SweepRecord, Trial
from scaleray.study_tables import seconds
from scaleray.sweep_settings import BROKEN, Setting, best_by_batch, settings, trained
from scaleray.tracking.study_values import thinned

MOST_LINES = 60
"""Curves of one figure."""
MOST_CURVE_POINTS = 60
"""Evaluations of one line."""
MOST_MARKS = 1500
"""Settings of all maps together, and trials of one scatter."""
PANELS = 4
"""Rules side by side in one map."""
MOST_BESIDE = 3.0
"""Factor by which the frame of noise scales goes beyond the measured ones, however wide their intervals are."""
MOST_ARROWS = 60
"""Trials of one figure whose intervals end in an arrow where they go on."""


def sweep_drawings(record: SweepRecord) -> list[Drawing]:
    """All figures for which there are figures."""
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


def maps(record: SweepRecord) -> list[Drawing]:
    """Batch size by learning rate, a panel for each rule: colour is the samples to the target, or the metric without one."""
    found = settings(record)
    by_target = any(s.samples_to_target is not None for s in found)
    value_of: Callable[[Setting], float | None] = (lambda s: s.samples_to_target) if by_target else (lambda s: s.value)
    rules = list(dict.fromkeys(s.rule for s in found))
    if not rules:
        return []
    left = f" {MOST_MARKS} of {len(found)} settings are drawn." if len(found) > MOST_MARKS else ""
    found = thinned(found, MOST_MARKS)
    known = [v for s in found if (v := value_of(s)) is not None]
    what = "samples to the target" if by_target else record.metric
    failed = [t for t in record.trials if t.status in ("failed", "diverged")]
    rows = math.ceil(len(rules) / PANELS)
    panels = [rules[len(rules) * i // rows : len(rules) * (i + 1) // rows] for i in range(rows)]
    return [
        _map(record, group, number, found, failed, value_of, known, what, left) for number, group in enumerate(panels)
    ]


def _map(
    record: SweepRecord, rules: Sequence[str], page: int, found: Sequence[Setting], failed: Sequence[Trial],
    value_of: Callable[[Setting], float | None], known: Sequence[float], what: str, left: str,
) -> Drawing:  # fmt: skip
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter

    by_target = what == "samples to the target"
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    norm: Any = LogNorm(low, high) if low > 0 and high > low else Normalize(low, high if high > low else low + 1)
    scale = "viridis" if by_target or record.direction == "min" else "viridis_r"
    batches = sorted({s.batch_size for s in found} | {t.batch_size for t in failed})
    best = {(s.rule, s.batch_size): s for rule in best_by_batch(record).values() for s in rule.values()}
    limits = rule_limits(record) if by_target else {}
    knee = find_knee(record) if by_target else None
    is_knee_shown = knee is not None and batches[0] <= knee.batch_size <= batches[-1]

    def paint(axes: Any) -> None:
        panels = axes if isinstance(axes, list) else [axes]
        drawn = None
        for ax, rule in zip(panels, rules, strict=True):
            own = [s for s in found if s.rule == rule]
            reached = [s for s in own if value_of(s) is not None]
            missed = [s for s in own if value_of(s) is None and any(t.status not in BROKEN for t in s.trials)]
            broken = {(t.batch_size, t.learning_rate) for t in failed if t.rule == rule}
            size = 62 if len(own) < 120 else 26
            drawn = ax.scatter(
                [s.batch_size for s in reached], [s.learning_rate for s in reached], c=[value_of(s) for s in reached], cmap=scale,
                norm=norm, s=size, linewidths=0, zorder=3,
            )  # fmt: skip
            ax.scatter([s.batch_size for s in missed], [s.learning_rate for s in missed], s=size * 0.7, facecolors="none", edgecolors=MUTED,
                       linewidths=0.9, zorder=2)  # fmt: skip
            ax.scatter(
                [b for b, _ in broken],
                [lr for _, lr in broken],
                marker="x",
                s=size * 0.6,
                color=VERMILION,
                linewidths=1.2,
                zorder=2,
            )
            chosen = [best[rule, b] for b in batches if (rule, b) in best]
            ax.plot(
                [s.batch_size for s in chosen],
                [s.learning_rate for s in chosen],
                color=INK,
                linewidth=1.0,
                alpha=0.7,
                zorder=4,
            )
            ax.scatter([s.batch_size for s in chosen], [s.learning_rate for s in chosen], s=size * 1.5, facecolors="none", edgecolors=INK,
                       linewidths=1.3, zorder=4)  # fmt: skip
            shared = [s for s in own if s.one_training_with]
            ax.scatter(
                [s.batch_size for s in shared],
                [s.learning_rate for s in shared],
                s=size * 0.12,
                color="white",
                linewidths=0,
                zorder=5,
            )
            drawing.log2_axis(ax.xaxis, batches, most=7 if len(rules) < 4 else 5)
            drawing.log_axis(ax.yaxis)
            ax.margins(0.09)
            right = ax.get_xlim()[1]
            if (ended := ended_at(limits.get(rule))) is not None:
                ax.axvspan(ended / math.sqrt(2), right, color=PALE, alpha=0.35, linewidth=0, zorder=0)
            if knee is not None and is_knee_shown:
                ax.axvline(knee.batch_size, color=INK, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
            ax.set_xlim(right=right)
            ax.set_title(rule, loc="left", fontsize=10, color=INK, fontweight="bold")
            ax.set(xlabel="batch size")
        panels[0].set_ylabel("learning rate")
        if drawn is not None and known:
            bar = panels[-1].figure.colorbar(
                drawn, ax=panels, pad=0.015, aspect=28, format=FuncFormatter(lambda v, _: drawing.number(v))
            )
            drawing.log_axis(bar.ax.yaxis) if isinstance(norm, LogNorm) else drawing.plain_axis(bar.ax.yaxis)
            bar.outline.set_visible(False)
            bar.set_label(what, color=MUTED, fontsize=8.5)

    signs = ["ringed: the best at its batch size"]
    signs += (
        ["hollow: " + ("missed the target" if by_target else "no value")]
        if any(value_of(s) is None for s in found)
        else []
    )
    signs += ["cross: failed or diverged"] if failed else []
    signs += (
        ["shaded: from the first batch size on at which the rule missed the target"]
        if any(ended_at(limits.get(r)) for r in rules)
        else []
    )
    signs += (
        [f"dotted: the critical batch size of these trials, about {knee.batch_size:,.0f}"]
        if knee is not None and is_knee_shown
        else []
    )
    signs += (
        ["white centre: one training with another rule, which ran once and stands under both"]
        if any(s.one_training_with for s in found if s.rule in rules)
        else []
    )
    caption = f"Colour: {what}, the median over seeds; {'; '.join(signs)}.{left}"
    title = "Batch size and learning rate, by rule" if len(rules) > 1 else f"Batch size and learning rate, {rules[0]}"
    return draw(
        f"map-{page}", title, caption, paint, columns=len(rules), is_wide=len(rules) > 1, share_y=True,
        height_in=3.5, marks=record.marks,
    )  # fmt: skip


def to_target(record: SweepRecord, what: str) -> Drawing:
    """Samples or seconds to the target over the batch size, a line for each rule."""
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
    shared = f" At batch {', '.join(map(str, meeting))} rules are one training, which ran once." if meeting else ""
    caption = (
        f"The best learning rate of each rule at each batch size; small dots are single seeds. {reading}{shared} "
        "A line ends where the target is missed."
    )
    return draw(f"target-{what}", f"{what.capitalize()} to target", caption, paint, marks=record.marks)


def curves(record: SweepRecord, against: str) -> Drawing:
    """The metric over samples or seconds, coloured by batch size: the best trial of each rule and batch size first."""
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
        drawing.legend_beside(ax, "batch size")

    left = (
        f" {len(chosen)} of {len(with_curve)} trials are drawn: the best of each rule and batch size, then evenly over the rest."
        if len(chosen) < len(with_curve)
        else ""
    )
    return draw(
        f"curves-{against}", f"{record.metric} against {against}",
        f"A line for each trial, coloured by its batch size.{left}", paint, marks=record.marks,
    )  # fmt: skip


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
                ax.plot([p.batch_size], [v], marker="o" if p.is_measured else "D" if p.is_trusted else "x", color=colour,
                        markerfacecolor=colour if p.is_measured else "white", markersize=5 if p.is_measured else 4)  # fmt: skip
            ends.append((batches[-1], values[-1], label, colour))
        drawing.log2_axis(ax.xaxis, batches)
        ax.set_ylim(0, 112)
        drawing.plain_axis(ax.yaxis, show=lambda v: f"{v:.0f}%")
        ax.annotate(f"best: {best.batch_size}", (best.batch_size, 100), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8.5,
                    color=BLUE, fontweight="bold")  # fmt: skip
        ax.set(xlabel="batch size", ylabel="share of the largest")
        drawing.label_ends(ax, ends)

    unsure = (
        " Cross: further than 4 times from a measured batch size, not to be trusted."
        if not all(p.is_trusted for p in points)
        else ""
    )
    caption = f"Goodput is throughput times statistical efficiency. Dot: measured; diamond: predicted.{unsure} Bands are 95% intervals."
    return draw("goodput", "Goodput", caption, paint, marks=record.marks)


def noise(record: SweepRecord) -> Drawing:
    """The noise scale of each trial with its interval, over the samples that it had trained on."""
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
                [t.samples for t in own], [t.noise_scale for t in own], color=shade[batch], s=16, linewidths=0, alpha=0.85,
                label=str(batch), zorder=3,
            )  # fmt: skip
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        drawing.log_axis(ax.yaxis)
        drawing.log_axis(ax.xaxis)
        ax.set(xlabel="samples trained on", ylabel="noise scale in samples")
        drawing.legend_beside(ax, "batch size")

    left = f" {len(shown)} of {len(measured)} trials are drawn." if len(shown) < len(measured) else ""
    bars = " Bars: 95% intervals; those that reach the frame go on." if ends else ""
    open_ = " A bar without a dot: larger than could be resolved." if any(not t.noise_scale for t in shown) else ""
    caption = f"A dot for each trial at its end. Batches far below the noise scale waste no samples.{bars}{open_}{left}"
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
