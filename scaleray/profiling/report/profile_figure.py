"""Figures of a run's time: ranks over time, parts of a step on each rank, one step, and the whole run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PURPLE, SKY, VERMILION, Drawing, draw
from scaleray.records.phases import PART_IN_WORDS, PARTS, Phase
from scaleray.records.profile_record import RankProfile, RunProfile
from scaleray.records.text.units import seconds

COLOURS: Mapping[str, str] = {
    Phase.INPUT: ORANGE,
    Phase.COPY: PURPLE,
    Phase.FORWARD: SKY,
    Phase.BACKWARD: BLUE,
    Phase.COMMUNICATION: VERMILION,
    Phase.STRAGGLER: "#7a2e00",
    Phase.OPTIMIZER: GREEN,
    Phase.HOST: MUTED,
    Phase.EVALUATION: "#F0E442",
    Phase.CHECKPOINT: "#44AA99",
    Phase.OTHER: PALE,
}
GOODPUT_COLOURS = {
    "productive": GREEN,
    "start": SKY,
    "restart": VERMILION,
    "repeated": "#7a2e00",
    "input": ORANGE,
    "checkpoint": "#44AA99",
    "evaluation": "#F0E442",
    "other": PALE,
}
MOST_BARS = 32
"""Maximum number of ranks with a bar of their own; those with the longest steps are chosen."""
LEAST_SHOWN = 0.005
"""Parts below this share of a step have no label."""


def profile_drawings(profile: RunProfile) -> list[Drawing]:
    """Figures of a profile, without those that lack measurements."""
    found = [_parts_by_rank(profile), _waterfall(profile)]
    if len(profile.ranks) > 1 and any(len(rank.step.series) > 1 for rank in profile.ranks):
        found.insert(0, _heat_map(profile))
    return [*found, *([_goodput(profile)] if profile.goodput is not None else [])]


def _heat_map(profile: RunProfile) -> Drawing:
    """Heat map of ranks over time: step time, and lateness if known."""
    is_late_known = any(rank.late_s is not None and rank.late_s.series for rank in profile.ranks)
    panels = [("step time in ms", _matrix(profile, [rank.step.series for rank in profile.ranks]))]
    if is_late_known:
        late = [rank.late_s.series if rank.late_s is not None else [] for rank in profile.ranks]
        panels.append(("lateness in ms", _matrix(profile, late)))
    buckets = profile.buckets
    # an evaluation in one bucket must not dominate the colour scale
    tops = [float(np.nanpercentile(values, 99)) for _, values in panels]

    def paint(axes: Any) -> None:
        axes = axes if isinstance(axes, list) else [axes]
        for ax, (label, values), top in zip(axes, panels, tops, strict=True):
            end = buckets.first_step + buckets.width * buckets.count
            shown = ax.imshow(
                values,
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
                vmin=min(0.0, top) if label.startswith("late") else float(np.nanmin(values)),
                vmax=top if top > float(np.nanmin(values)) else None,
                extent=(buckets.first_step - 0.5, end - 0.5, len(values) - 0.5, -0.5),
            )
            ax.grid(visible=False)
            ax.set(xlabel="step", ylabel="rank" if ax is axes[0] else "")
            _rank_ticks(ax, [rank.rank for rank in profile.ranks])
            drawing.plain_axis(ax.xaxis, most=5)
            bar = ax.figure.colorbar(shown, ax=ax, aspect=24, pad=0.02, extend="max")
            bar.outline.set_visible(False)
            bar.set_label(label)

    every = f"the mean of {buckets.width} steps" if buckets.width > 1 else "a step"
    late_words = (
        " Right: delay of each rank behind the first at its collectives."
        if is_late_known
        else " Lateness was not measured."
    )
    return draw(
        "ranks-over-time",
        "Ranks over time",
        f"Each cell is {every} on one rank, including the evaluations and checkpoints before it. "
        f"The colour scale is cut at the slowest 1 %.{late_words}",
        paint,
        columns=len(panels),
        is_wide=True,
        height_in=min(6.0, 1.9 + 0.14 * len(profile.ranks)),
    )


def _matrix(profile: RunProfile, series: Sequence[Sequence[float]]) -> np.ndarray:
    """Milliseconds (ranks, buckets); NaN if there is no value."""
    values = np.full((len(series), profile.buckets.count), np.nan)
    for row, of_rank in enumerate(series):
        if len(of_rank) == profile.buckets.count:
            values[row] = 1e3 * np.array(of_rank, dtype=float)
    return values


def _rank_ticks(ax: Any, ranks: Sequence[int]) -> None:
    every = max(1, len(ranks) // 12)
    ax.set_yticks(range(0, len(ranks), every), [str(rank) for rank in ranks[::every]])


def _shown_ranks(profile: RunProfile) -> list[RankProfile]:
    slowest = sorted(profile.ranks, key=lambda rank: -rank.step.total)[:MOST_BARS]
    return sorted(slowest, key=lambda rank: rank.rank)


def _parts_of(rank: RankProfile) -> dict[str, float]:
    """Mean seconds per step of each part, in order."""
    return {part: rank.phases[part].total / rank.steps for part in PARTS if part in rank.phases}


def _parts_by_rank(profile: RunProfile) -> Drawing:
    ranks = _shown_ranks(profile)
    parts = [_parts_of(rank) for rank in ranks]
    names = [part for part in PARTS if any(of_rank.get(part, 0.0) > 0 for of_rank in parts)]

    def paint(ax: Any) -> None:
        for place, of_rank in enumerate(parts):
            left = 0.0
            for name in names:
                width = 1e3 * of_rank.get(name, 0.0)
                label = PART_IN_WORDS[name] if place == 0 else None
                ax.barh(place, width, left=left, height=0.72, color=COLOURS[name], linewidth=0, label=label)
                left += width
        ax.invert_yaxis()
        _rank_ticks(ax, [rank.rank for rank in ranks])
        ax.grid(axis="y", visible=False)
        drawing.plain_axis(ax.xaxis)
        ax.set(xlabel="ms per step, mean", ylabel="rank")
        drawing.legend_right(ax, "")

    left_out = f" The {len(ranks)} slowest of {len(profile.ranks)} ranks." if len(ranks) < len(profile.ranks) else ""
    closing = (
        f"The parts add up to the step within {profile.gap:.2%}."
        if profile.closes and profile.gap is not None
        else "The parts do not add up to the step: they are unreliable."
    )
    return draw(
        "parts-by-rank",
        "Parts of a step",
        f"{closing} The first step of each process is omitted.{left_out}",
        paint,
        height_in=min(7.0, max(drawing.HEIGHT_IN, 0.9 + 0.24 * len(ranks))),
    )


def _waterfall(profile: RunProfile) -> Drawing:
    """A typical step of the rank with the longest steps, part by part."""
    rank = max(profile.ranks, key=lambda one: one.step.median)
    parts = [(part, rank.phases[part].median) for part in PARTS if part in rank.phases]
    whole = sum(value for _, value in parts) or 1.0
    shown = [(part, value) for part, value in parts if value >= LEAST_SHOWN * whole]

    def paint(ax: Any) -> None:
        begin = 0.0
        for place, (part, value) in enumerate(shown):
            ax.barh(place, 1e3 * value, left=1e3 * begin, height=0.66, color=COLOURS[part], linewidth=0)
            words = f"{seconds(value)} · {value / whole:.0%}"
            is_right = begin + value < 0.62 * whole
            ax.annotate(
                words,
                (1e3 * (begin + value if is_right else begin), place),
                xytext=(4 if is_right else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if is_right else "right",
                fontsize=8.5,
                color=INK,
            )
            begin += value
        ax.set_yticks(range(len(shown)), [PART_IN_WORDS[Phase(part)] for part, _ in shown])
        ax.tick_params(axis="y", length=0, labelcolor=INK)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        drawing.plain_axis(ax.xaxis)
        ax.set(xlabel="ms, median of each part")

    missing = len(parts) - len(shown)
    small = f" {missing} parts below {LEAST_SHOWN:.1%} are omitted." if missing else ""
    return draw(
        "one-step",
        f"One step, on rank {rank.rank}",
        f"A typical step of the rank with the longest steps; passes of several micro-batches are combined.{small}",
        paint,
    )


def _goodput(profile: RunProfile) -> Drawing:
    assert profile.goodput is not None
    shares = {name: share for name, share in profile.goodput.shares().items() if share > 0}

    def paint(ax: Any) -> None:
        left = 0.0
        for name, share in shares.items():
            words = f"{name} {share:.1%}"
            ax.barh(0, 100 * share, left=left, height=0.6, color=GOODPUT_COLOURS[name], linewidth=0, label=words)
            left += 100 * share
        ax.set_xlim(0, 100)
        ax.set_yticks([])
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        drawing.plain_axis(ax.xaxis)
        ax.set(xlabel="share of elapsed time in %")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, handlelength=1.0, columnspacing=1.2)

    attempts = profile.goodput.attempts
    over = f" over {attempts} attempts" if attempts > 1 else ""
    again = (
        f" {profile.goodput.repeated_steps} steps were repeated after a resume."
        if profile.goodput.repeated_steps
        else ""
    )
    return draw(
        "goodput",
        "Goodput",
        f"Use of {seconds(profile.goodput.elapsed_s)}{over}: {shares.get('productive', 0.0):.1%} went to steps that "
        f"count.{again}",
        paint,
        is_wide=True,
        height_in=1.5,
    )
