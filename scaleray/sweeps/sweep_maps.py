"""Maps of a sweep's settings by batch size and learning rate, with one panel per rule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.recording.study_values import thinned
from scaleray.records.page import drawing
from scaleray.records.page.drawing import INK, MUTED, PALE, VERMILION, Drawing, draw
from scaleray.records.settings import BROKEN, Setting, best_by_batch, settings
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.sweeps.result import Knee, RuleRange, find_knee
from scaleray.sweeps.rule_limits import ended_at, rule_limits

MOST_MARKS = 1500
"""Maximum number of settings in all maps together, and of trials in a scatter plot."""
PANELS = 4
"""Maximum number of rules side by side in one map."""


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """Marks of all maps of a sweep, and the value shown by their colour."""

    found: Sequence[Setting]
    """Settings that are drawn."""
    failed: Sequence[Trial]
    best: Mapping[tuple[str, int], Setting]
    """Best setting by rule and batch size."""
    batches: Sequence[int]
    is_by_target: bool
    """Whether colour shows the samples to the target; otherwise it shows the metric."""
    metric: str
    is_low_good: bool
    """Whether lower is better for the value shown by colour."""
    limits: Mapping[str, RuleRange]
    knee: Knee | None
    """Critical batch size, if it is within the batch sizes drawn."""

    @property
    def what(self) -> str:
        """Name of the value shown by colour."""
        return "samples to the target" if self.is_by_target else self.metric

    @property
    def known(self) -> list[float]:
        """Values shown by colour, of settings that have one."""
        return [v for s in self.found if (v := self.value(s)) is not None]

    def value(self, setting: Setting) -> float | None:
        """Value of a setting shown by colour."""
        return setting.samples_to_target if self.is_by_target else setting.value


def maps(record: SweepRecord) -> list[Drawing]:
    """Draw batch size by learning rate, one panel per rule; colour shows the samples to the target or the metric."""
    found = settings(record)
    rules = list(dict.fromkeys(s.rule for s in found))
    if not rules:
        return []
    left = f" {MOST_MARKS} of {len(found)} settings are drawn." if len(found) > MOST_MARKS else ""
    marks = _marks(record, found)
    rows = math.ceil(len(rules) / PANELS)
    panels = [rules[len(rules) * i // rows : len(rules) * (i + 1) // rows] for i in range(rows)]
    return [_map(record, marks, group, number, left) for number, group in enumerate(panels)]


def _marks(record: SweepRecord, found: Sequence[Setting]) -> _Marks:
    is_by_target = any(s.samples_to_target is not None for s in found)
    found = thinned(found, MOST_MARKS)
    failed = [t for t in record.trials if t.status in ("failed", "diverged")]
    batches = sorted({s.batch_size for s in found} | {t.batch_size for t in failed})
    knee = find_knee(record) if is_by_target else None
    return _Marks(
        found=found,
        failed=failed,
        best={(s.rule, s.batch_size): s for rule in best_by_batch(record).values() for s in rule.values()},
        batches=batches,
        is_by_target=is_by_target,
        metric=record.metric,
        is_low_good=is_by_target or record.direction == "min",
        limits=rule_limits(record) if is_by_target else {},
        knee=knee if knee is not None and batches[0] <= knee.batch_size <= batches[-1] else None,
    )


def _map(record: SweepRecord, marks: _Marks, rules: Sequence[str], page: int, left: str) -> Drawing:
    from matplotlib.colors import LogNorm, Normalize

    known = marks.known
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    norm: Any = LogNorm(low, high) if low > 0 and high > low else Normalize(low, high if high > low else low + 1)

    def paint(axes: Any) -> None:
        panels = axes if isinstance(axes, list) else [axes]
        drawn = None
        for ax, rule in zip(panels, rules, strict=True):
            drawn = _paint_settings(ax, marks, rule, norm)
            drawing.log2_axis(ax.xaxis, marks.batches, most=7 if len(rules) < 4 else 5)
            drawing.log_axis(ax.yaxis)
            ax.margins(0.09)
            _paint_limits(ax, marks, rule)
            ax.set_title(rule, loc="left", fontsize=10, color=INK, fontweight="bold")
            ax.set(xlabel="batch size")
        panels[0].set_ylabel("learning rate")
        if drawn is not None and known:
            bar = _colour_bar(panels, drawn, marks.what, is_log=isinstance(norm, LogNorm))
            if low == high:
                bar.set_ticks([low])

    caption = f"Colour: {marks.what}, the median over seeds; {'; '.join(_signs(marks, rules))}.{left}"
    title = "Batch size and learning rate, by rule" if len(rules) > 1 else f"Batch size and learning rate, {rules[0]}"
    return draw(
        f"map-{page}",
        title,
        caption,
        paint,
        columns=len(rules),
        is_wide=len(rules) > 1,
        share_y=True,
        height_in=3.5,
        marks=record.marks,
    )


def _paint_settings(ax: Any, marks: _Marks, rule: str, norm: Any) -> Any:
    """Draw the settings of one rule; return the coloured ones for the colour bar."""
    own = [s for s in marks.found if s.rule == rule]
    reached = [s for s in own if marks.value(s) is not None]
    missed = [s for s in own if marks.value(s) is None and any(t.status not in BROKEN for t in s.trials)]
    broken = {(t.batch_size, t.learning_rate) for t in marks.failed if t.rule == rule}
    size = 62 if len(own) < 120 else 26
    drawn = ax.scatter(
        [s.batch_size for s in reached],
        [s.learning_rate for s in reached],
        c=[marks.value(s) for s in reached],
        cmap="viridis" if marks.is_low_good else "viridis_r",
        norm=norm,
        s=size,
        linewidths=0,
        zorder=3,
    )
    ax.scatter(
        [s.batch_size for s in missed],
        [s.learning_rate for s in missed],
        s=size * 0.7,
        facecolors="none",
        edgecolors=MUTED,
        linewidths=0.9,
        zorder=2,
    )
    ax.scatter(
        [b for b, _ in broken],
        [lr for _, lr in broken],
        marker="x",
        s=size * 0.6,
        color=VERMILION,
        linewidths=1.2,
        zorder=2,
    )
    _paint_best(ax, [marks.best[rule, b] for b in marks.batches if (rule, b) in marks.best], size)
    shared = [s for s in own if s.one_training_with]
    ax.scatter(
        [s.batch_size for s in shared],
        [s.learning_rate for s in shared],
        s=size * 0.12,
        color="white",
        linewidths=0,
        zorder=5,
    )
    return drawn


def _paint_best(ax: Any, chosen: Sequence[Setting], size: float) -> None:
    """Ring the best setting at each batch size, and connect them with a line."""
    ax.plot(
        [s.batch_size for s in chosen], [s.learning_rate for s in chosen], color=INK, linewidth=1.0, alpha=0.7, zorder=4
    )
    ax.scatter(
        [s.batch_size for s in chosen],
        [s.learning_rate for s in chosen],
        s=size * 1.5,
        facecolors="none",
        edgecolors=INK,
        linewidths=1.3,
        zorder=4,
    )


def _paint_limits(ax: Any, marks: _Marks, rule: str) -> None:
    """Shade the batch sizes at which a rule missed the target, and mark the critical batch size with a dotted line."""
    right = ax.get_xlim()[1]
    if (ended := ended_at(marks.limits.get(rule))) is not None:
        ax.axvspan(ended / math.sqrt(2), right, color=PALE, alpha=0.35, linewidth=0, zorder=0)
    if marks.knee is not None:
        ax.axvline(marks.knee.batch_size, color=INK, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
    ax.set_xlim(right=right)


def _colour_bar(panels: Sequence[Any], drawn: Any, what: str, *, is_log: bool) -> Any:
    from matplotlib.ticker import FuncFormatter

    bar = panels[-1].figure.colorbar(
        drawn, ax=panels, pad=0.015, aspect=28, format=FuncFormatter(lambda v, _: drawing.number(v))
    )
    drawing.log_axis(bar.ax.yaxis) if is_log else drawing.plain_axis(bar.ax.yaxis)
    bar.outline.set_visible(False)
    bar.set_label(what, color=MUTED, fontsize=8.5)
    return bar


def _signs(marks: _Marks, rules: Sequence[str]) -> list[str]:
    """Legend of the signs used on a map."""
    signs = ["ringed: the best at its batch size"]
    if any(marks.value(s) is None for s in marks.found):
        signs.append("hollow: " + ("missed the target" if marks.is_by_target else "no value"))
    if marks.failed:
        signs.append("cross: failed or diverged")
    if any(ended_at(marks.limits.get(r)) for r in rules):
        signs.append("shaded: from the first batch size at which the rule missed the target")
    if marks.knee is not None:
        signs.append(f"dotted: the critical batch size of these trials, about {marks.knee.batch_size:,.0f}")
    if any(s.one_training_with for s in marks.found if s.rule in rules):
        signs.append("white centre: the same training as under another rule, run once and shown under both")
    return signs
