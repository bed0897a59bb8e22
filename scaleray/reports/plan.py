"""A plan on the terminal: the ranked layouts, memory against the card's size, what the step is made of, the curve and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from scaleray.planner.advise import Advice, Choice
from scaleray.planner.checkpoints import CheckpointCost
from scaleray.planner.fits import memory_interval
from scaleray.planner.memory import GIB
from scaleray.planner.outlook import Outlook
from scaleray.planner.published.rows import Skipped
from scaleray.planner.validate import Score


def plan_table(advice: Advice, *, rows: int) -> Table:
    """The first `rows` choices."""
    question = advice.question
    cluster = question.cluster
    made = _table(
        f"{question.model.name} ({_count(question.model.num_params)} parameters) on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name}, "
        f"{question.global_batch} samples a step, {question.precision}",
        f"{len(advice.choices)} of {advice.num_layouts} layouts fit; intervals hold 90 % of published rows like these"
        + ("" if all(choice.is_trusted for choice in advice.choices[:rows]) else "; ? marks what should not be trusted without a measurement")
        + ("" if all(choice.fits == "fits" for choice in advice.choices[:rows]) else "; ! may not fit"),
    )  # fmt: skip
    for name in ("layout", "micro-\nbatch", "recompute", "step s", "90 % interval", "tokens/s" if question.model.tokens_per_sample > 1 else "samples/s", "MFU %", "GiB", "waits for\ncomm %"):  # fmt: skip
        made.add_column(name, justify="left" if name in ("layout", "recompute") else "right", no_wrap=True)
    priced = cluster.price_per_gpu_hour is not None
    if priced:
        made.add_column("per 1M\nsamples", justify="right", no_wrap=True)
    for choice in advice.choices[:rows]:
        layout, step = choice.layout, choice.step_time_s
        rate = choice.tokens_per_s if question.model.tokens_per_sample > 1 else choice.samples_per_s
        cells = [
            _layout_words(choice), f"{layout.micro_batch} x {layout.accumulation}", layout.checkpointing, f"{step.value:.3g}",
            f"{step.low:.3g} to {step.high:.3g}{'' if choice.is_trusted else ' ?'}", _count(rate), f"{100 * choice.mfu:.1f}",
            f"{choice.memory.device_bytes / GIB:.1f}{'' if choice.fits == 'fits' else ' !'}", f"{100 * choice.step.exposed_comm_s / choice.step.total_s:.0f}",
        ]  # fmt: skip
        made.add_row(*cells, *([f"{choice.cost_per_million_samples:.2f}"] if priced else []))
    return made


def plan_lines(
    advice: Advice, seen: Outlook, *, num_samples: float | None = None, kept: CheckpointCost | None = None
) -> list[str]:
    """What follows the table: why, where memory and time go, the curve, checkpoints, the verdict."""
    best, cluster = advice.best, advice.question.cluster
    lines = [f"recommended: {best.layout.describe()}", f"  {why(advice)}", f"  {seen.limit}"]
    lines += [f"  assumed: {note}" for note in (*cluster.notes, *advice.question.model.notes)]
    lines += [f"  unlike the published rows, so that its interval is wider: {words}" for words in best.doubts]
    lines += ["", f"memory of one GPU, {cluster.gpu.memory_gib:.1f} GiB:"]
    lines += memory_doubt(advice)
    lines += _bars({name: value / GIB for name, value in best.memory.parts().items()}, cluster.gpu.memory_gib, "GiB")
    lines += ["", "time of one step:", *_bars(best.step.parts(), best.step.total_s, "s")]
    lines += ["", "GPUs   samples/s (90 % interval)        efficiency  layout"]
    for point in seen.points:
        lines.append(
            f"{point.num_gpus:5d}  {point.samples_per_s!s:<32} {100 * point.efficiency:6.1f} %    {point.choice.layout.describe()}"
        )
    dropped = Counter(one.layout.strategy for one in advice.rejected)
    if dropped:
        lines += [
            "",
            "dropped for memory: "
            + ", ".join(f"{count} of {name}" for name, count in dropped.most_common(6))
            + " (plan explain says why)",
        ]
    if kept is not None:
        lines += ["", *checkpoint_lines(kept)]
    if num_samples:
        hours = num_samples / best.samples_per_s / 3600 / (kept.time_ratio if kept is not None else 1.0)
        price = cluster.price_per_gpu_hour
        cost = "" if price is None else f", {hours * price * cluster.num_gpus:,.0f} in all"
        lines.append(f"{num_samples:,.0f} samples take {hours:,.1f} hours{cost}")
    if not best.is_trusted:
        lines.append(
            "do not trust the figures alone: nothing was measured on this model. One step on one GPU narrows them: --step-time, --from-run"
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
    """Where the recommended layout may need more than there is: how much, and the fastest that does not."""
    best = advice.best
    if best.fits == "fits":
        return []
    needed = memory_interval(best.memory)
    found = [
        f"  may not fit: {needed.value / GIB:.1f} GiB are predicted, {needed.high / GIB:.1f} are as many as rows like it took"
    ]
    safe = next((one for one in advice.choices if one.fits == "fits"), None)
    if safe is not None:
        slower = 100 * (safe.step_time_s.value / best.step_time_s.value - 1)
        found.append(f"  the fastest that fits all the same, {slower:.0f} % slower: {safe.layout.describe()}")
    return found


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
    made = _table(
        title,
        "errors in % of step time: median / 90th percentile. trivial: throughput per GPU stays that of the smallest point",
    )
    for name in ("", "rows", "data sheets", "rows", "one point", "trivial", "bends", "ours/trivial", "eff. pts", "Pollux (ours)", "memory", "OOM", "inside %", "rank", "regret %"):  # fmt: skip
        made.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for line in lines:
        made.add_row(
            line.name, str(line.num_sheets), _pair(line.sheets_median, line.sheets_p90), str(line.num_anchored),
            _pair(line.anchored_median, line.anchored_p90), _pair(line.trivial_median, line.trivial_p90), str(line.num_bending),
            _pair(line.bending_mean, line.bending_trivial_mean), _points(line.efficiency_median_points),
            "" if line.pollux_median is None else f"{_percent(line.pollux_median)} ({_percent(line.anchored_where_pollux_median)})",
            f"{_pair(line.memory_median, line.memory_p90)} of {line.num_memory}" if line.num_memory else "",
            f"{line.num_out_of_memory_right}/{line.num_out_of_memory}" if line.num_out_of_memory else "",
            _percent(line.inside_share, 0), "" if line.rank_correlation is None else f"{line.rank_correlation:.2f}", _percent(line.regret),
        )  # fmt: skip
    return made


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Rows that were not judged, grouped by reason."""
    groups = Counter((one.source, one.reason) for one in skipped)
    return [f"{count:5d} rows of {source}: {reason}" for (source, reason), count in sorted(groups.items())]


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title, caption=caption, box=box.SIMPLE, padding=(0, 1), title_justify="left", caption_justify="left"
    )


def _layout_words(choice: Choice) -> str:
    layout = choice.layout
    words = layout.strategy + (f" data {layout.data}" if layout.data > 1 else "")
    return (
        words
        + (f" shard {layout.shard}" if layout.sharding == "zero3" and layout.shard != layout.data else "")
        + (" interleaved" if layout.chunks > 1 else "")
    )


def _kind(layout: Any) -> str:
    words = (
        [{"none": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp"}[layout.sharding]]
        if layout.data > 1
        else []
    )
    return (
        "+".join([*words, *(["tp"] if layout.tensor > 1 else []), *(["pp"] if layout.pipeline > 1 else [])]) or "single"
    )


def _bars(parts: dict[str, float], whole: float, unit: str) -> list[str]:
    width = 50
    shown = {name: value for name, value in parts.items() if value > 0.002 * whole}
    return [
        f"  {name:<16} {'#' * max(1, round(width * value / whole)):<{width}} {value:8.3g} {unit}"
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
