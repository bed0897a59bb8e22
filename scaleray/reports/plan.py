"""A plan on the terminal: the ranked layouts, memory against the card's size, what the step is made of, the curve and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from scaleray.planner.advise import Advice, Choice
from scaleray.planner.checkpoints import CheckpointCost
from scaleray.planner.fits import memory_interval
from scaleray.planner.memory import GIB
from scaleray.planner.outlook import Outlook
from scaleray.planner.published.rows import Skipped
from scaleray.planner.transfers import TransferScore
from scaleray.planner.validate import Score
from scaleray.planner.write import is_runnable, layout_options
from scaleray.reports.terminal_tables import as_rich
from scaleray.study_tables import Table, count, memory, seconds, sentence_case, with_interval


def plan_view(
    advice: Advice, seen: Outlook, *, rows: int, width: int, num_samples: float | None = None, kept: CheckpointCost | None = None
) -> RenderableType:  # fmt: skip
    """The whole plan for a console of `width` columns: layouts, why, where memory and time go, the curve, checkpoints, the verdict."""
    best, question = advice.best, advice.question
    cluster = question.cluster
    why_lines = [
        f"recommended: {best.layout.describe()}",
        f"  {why(advice)}",
        f"  {seen.limit}",
        *(f"  {line}" for line in faster_lines(advice)),
    ]
    why_lines += [f"  assumed: {note}" for note in (*cluster.notes, *question.model.notes)]
    why_lines += [f"  {line}" for line in width_lines(best)]
    room = bar_width(width)
    memory_lines = [
        "",
        f"memory of one GPU, {cluster.gpu.memory_gib:.1f} GiB:",
        *(f"  {line}" for line in memory_doubt(advice)),
    ]
    memory_lines += _bars(
        {name: value / GIB for name, value in best.memory.parts().items()}, cluster.gpu.memory_gib, "GiB", room
    )
    time_lines = ["", "time of one step:", *_bars(best.step.parts(), best.step.total_s, "s", room), ""]
    return Group(
        as_rich(layout_table(advice, rows), width=width),
        *map(_text, [*why_lines, *memory_lines, *time_lines]),
        as_rich(curve_table(seen), width=width),
        *map(_text, _closing(advice, seen, num_samples, kept)),
    )


def layout_table(advice: Advice, rows: int) -> Table:
    """The first `rows` choices, the recommended one first."""
    question, shown = advice.question, advice.choices[:rows]
    cluster = question.cluster
    has_tokens = question.model.tokens_per_sample > 1
    cells = []
    for number, one in enumerate(shown, 1):
        row = {
            "rank": f"{number}{'' if one is not advice.best else ' *'}", "layout": one.layout.describe(),
            "step time": with_interval(one.step_time_s, seconds) + ("" if one.is_trusted else " ?"),
            "tokens/s" if has_tokens else "samples/s": count(one.tokens_per_s if has_tokens else one.samples_per_s), "MFU": f"{one.mfu:.1%}",
            "memory": memory(one.memory.device_bytes) + ("" if one.fits == "fits" else " !"), "waits for comm": f"{one.step.exposed_comm_s / one.step.total_s:.0%}",
        }  # fmt: skip
        if one.cost_per_million_samples is not None:
            row["per 1M samples"] = f"{one.cost_per_million_samples:.2f}"
        cells.append(row)
    notes = [
        f"{len(advice.choices)} of {advice.num_layouts} layouts fit. In brackets the interval that holds 90% of published rows like these."
    ]
    notes.append(f"* recommended: {_ranked_words(advice)}.")
    notes += [] if all(one.fits == "fits" for one in shown) else ["! its memory may not fit."]
    notes += [] if all(one.is_trusted for one in shown) else ["? should not be trusted without a measurement."]
    title = (
        f"{question.model.name} ({_count(question.model.num_params)} parameters) on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name}, "
        f"{question.global_batch} samples a step, {question.precision}"
    )  # fmt: skip
    return Table(title, tuple(cells[0]), tuple(tuple(row.values()) for row in cells), tuple(notes))


def _ranked_words(advice: Advice) -> str:
    if not any(one.fits == "fits" for one in advice.choices):
        return "of layouts that may not fit, for none surely does"
    return (
        "the smallest"
        if advice.question.rank_by == "memory"
        else "the fastest whose memory surely fits, and of those as fast the plainest"
    )


def curve_table(seen: Outlook) -> Table:
    """What the best layout of each number of GPUs would do."""
    rows = tuple(
        (str(p.num_gpus), with_interval(p.samples_per_s, count), f"{p.efficiency:.1%}", p.choice.layout.describe() + ("" if p.choice.fits == "fits" else " !"))
        for p in seen.points
    )  # fmt: skip
    base = f"Efficiency: throughput of a GPU over {count(seen.alone.samples_per_s)} samples/s, which one GPU alone would have with memory enough."
    marks = () if all(p.choice.fits == "fits" for p in seen.points) else ("! its memory may not fit.",)
    remarks = tuple(f"{sentence_case(words)}." for words in seen.remarks)
    return Table(
        "By number of GPUs", ("GPUs", "samples/s", "efficiency", "best layout"), rows, (base, *marks, *remarks)
    )


def _closing(advice: Advice, seen: Outlook, num_samples: float | None, kept: CheckpointCost | None) -> list[str]:
    best, cluster = advice.best, advice.question.cluster
    lines: list[str] = []
    dropped = Counter(one.layout.strategy for one in advice.rejected)
    if dropped:
        words = ", ".join(f"{count} of {name}" for name, count in dropped.most_common(6))
        lines.append(f"dropped for memory: {words} (plan explain says why)")
    if kept is not None:
        lines += ["", *checkpoint_lines(kept)]
    if num_samples:
        hours = num_samples / best.samples_per_s / 3600 / (kept.time_ratio if kept is not None else 1.0)
        price = cluster.price_per_gpu_hour
        cost = "" if price is None else f", {hours * price * cluster.num_gpus:,.0f} in all"
        lines.append(f"{num_samples:,.0f} samples take {hours:,.1f} hours{cost}")
    if not best.is_trusted:
        lines.append(
            "do not trust the figures alone: "
            + (
                "nothing was measured on this model. One step on one GPU narrows them: --step-time, --from-run"
                if best.kind == "unmeasured"
                else "what was measured is far from what is asked"
            )
        )
    return [*lines, f"next doubling: {seen.doubling}"]


def checkpoint_lines(kept: CheckpointCost) -> list[str]:
    """What checkpoints and interruptions take."""
    way = (
        "beside the training, which waits for the copy into the hosts' memory"
        if kept.is_asynchronous
        else "while the training waits"
    )
    chosen = ", the best distance for these interruptions" if kept.is_interval_chosen else ""
    lines = [
        f"checkpoints: {kept.state_bytes / GIB:,.1f} GiB, written in {kept.write_s:.3g} s {way}: {kept.stall_s:.3g} s of every {kept.interval_s / 60:.3g} minutes "
        f"({100 * kept.stall_share:.2g} %){chosen}"
    ]  # fmt: skip
    if kept.mtbf_s is not None:
        lines.append(
            f"  an interruption every {kept.mtbf_s / 3600:.3g} hours, {kept.restart_s / 60:.3g} minutes to restart: {100 * kept.time_ratio:.1f} % of the time trains"
        )
    return [*lines, *(f"  assumed: {note}" for note in kept.notes)]


def memory_doubt(advice: Advice) -> list[str]:
    """Where no layout surely fits: how much the recommended one may need."""
    best = advice.best
    if best.fits == "fits":
        return []
    return [f"no layout surely fits; this one may not fit: {_needed(best)}"]


def width_lines(choice: Choice) -> list[str]:
    """Why the interval of a choice is as wide as it is."""
    found = [f"its interval is wider: {reason.words}" for reason in choice.reasons]
    if choice.kind == "unmeasured":
        found = ["its interval is wide: nothing was measured, all is from data sheets"]
    return [*found, *(f"unlike the published rows, so that its interval is wider: {words}" for words in choice.doubts)]


def faster_lines(advice: Advice) -> list[str]:
    """A faster layout that may not fit: what it would gain, and how to find out."""
    rival = advice.faster
    if rival is None:
        return []
    gain = rival.samples_per_s / advice.best.samples_per_s - 1
    found = [f"{100 * gain:.0f} % faster, but may not fit: {rival.layout.describe()}; {_needed(rival)}"]
    if is_runnable(rival.layout):
        options = " ".join(layout_options(rival.layout))
        found.append(f"to try that one: a few steps of scaleray train with {options} --stop.after '5 steps', and peak_memory_bytes in their record.json")  # fmt: skip
    return found


def _needed(choice: Choice) -> str:
    said = memory_interval(choice.memory)
    return f"{said.value / GIB:.1f} GiB are predicted, {said.high / GIB:.1f} are as many as rows like it took"


def why(advice: Advice) -> str:
    """Why this layout, against the plainest one that was asked for."""
    best = advice.best.layout
    fits = {_kind(choice.layout) for choice in advice.choices}
    dropped = {_kind(one.layout): one for one in sorted(advice.rejected, key=lambda one: -one.missing_gib)}
    for name in ("ddp", "zero1", "fsdp"):
        if name in dropped and name not in fits and name != _kind(best):
            return f"{name} alone does not fit: at best {dropped[name].reason}; this layout splits the state further"
    rivals = [choice for choice in advice.choices if _kind(choice.layout) != _kind(best)]
    if not rivals:
        return "the only kind of layout that fits"
    rival = min(rivals, key=lambda one: one.step_time_s.value)
    ratio = rival.step_time_s.value / advice.best.step_time_s.value
    return (
        f"{ratio:.2f} times the speed of the best {_kind(rival.layout)}"
        if ratio > 1.02
        else f"as fast as {_kind(rival.layout)}, and plainer"
    )


def score_table(title: str, lines: Sequence[Score]) -> Table:
    """Validation, a line for each source or family. Errors in percent of the step time, efficiency in points."""
    columns = ("", "rows", "data sheets", "anchored rows", "one point", "trivial", "bends", "ours/trivial", "eff. pts", "Pollux (ours)", "memory", "OOM", "inside %", "rank", "regret %")  # fmt: skip
    rows = tuple(
        (
            line.name, str(line.num_sheets), _pair(line.sheets_median, line.sheets_p90), str(line.num_anchored),
            _pair(line.anchored_median, line.anchored_p90), _pair(line.trivial_median, line.trivial_p90), str(line.num_bending),
            _pair(line.bending_mean, line.bending_trivial_mean), _points(line.efficiency_median_points),
            "" if line.pollux_median is None else f"{_percent(line.pollux_median)} ({_percent(line.anchored_where_pollux_median)})",
            f"{_pair(line.memory_median, line.memory_p90)} of {line.num_memory}" if line.num_memory else "",
            f"{line.num_out_of_memory_right}/{line.num_out_of_memory}" if line.num_out_of_memory else "",
            _percent(line.inside_share, 0), "" if line.rank_correlation is None else f"{line.rank_correlation:.2f}", _percent(line.regret),
        )
        for line in lines
    )  # fmt: skip
    note = "Errors in % of step time: median / 90th percentile. trivial: throughput per GPU stays that of the smallest point."
    return Table(title, columns, rows, (note,))


def transfer_table(lines: Sequence[TransferScore]) -> Table:
    """Coverage of the intervals, a line for each transfer."""
    columns = (
        "asked from",
        "rows",
        "sources",
        "error %",
        "inside %",
        "mean of sources",
        "near's interval %",
        "its mean of sources",
        "interval",
    )
    rows = tuple(
        (
            line.words, str(line.num_rows), str(line.num_sources), _percent(line.error_median), _percent(line.inside_share, 0), _percent(line.inside_by_source, 0),
            _percent(line.near_share, 0), _percent(line.near_by_source, 0), "" if line.width_median is None else f"{line.width_median:.2f}",
        )
        for line in lines
    )  # fmt: skip
    note = (
        "Rows inside the stated 90% interval; near's interval: what would be stated if the distance were not known. error: median. "
        "interval: its upper end over its lower one, median."
    )
    return Table("intervals far from what was measured", columns, rows, (note,))


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Rows that were not judged, grouped by reason."""
    groups = Counter((one.source, one.reason) for one in skipped)
    return [f"{count:5d} rows of {source}: {reason}" for (source, reason), count in sorted(groups.items())]


def _text(line: str) -> Text:
    """A line that is wrapped between words, under its own indentation."""
    return Text(line, overflow="fold")


def _kind(layout: Any) -> str:
    words = (
        [{"none": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp"}[layout.sharding]]
        if layout.data > 1
        else []
    )
    return (
        "+".join([*words, *(["tp"] if layout.tensor > 1 else []), *(["pp"] if layout.pipeline > 1 else [])]) or "single"
    )


def bar_width(width: int) -> int:
    """Of the longest bar on a console of `width` columns."""
    return max(8, min(50, width - 34))


def _bars(parts: dict[str, float], whole: float, unit: str, room: int) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > 0.002 * whole}
    return [
        f"  {name:<16} {'#' * max(1, round(room * value / whole)):<{room}} {value:8.3g} {unit}"
        for name, value in shown.items()
    ]


def _count(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f}"


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _pair(first: float | None, second: float | None) -> str:
    return "" if first is None else f"{_percent(first)} / {_percent(second)}"
