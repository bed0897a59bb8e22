"""A plan for the terminal: ranked layouts, memory on the GPU, the parts of a step, the curve and its verdict."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from scaleray.planner.answers.advise import Advice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost
from scaleray.planner.report.plan_text import (
    checkpoint_lines,
    curve_table,
    faster_lines,
    layout_table,
    memory_doubt,
    why,
    width_lines,
)
from scaleray.records.terminal.terminal_tables import as_rich
from scaleray.records.text.units import GIB


def plan_view(
    advice: Advice,
    seen: Outlook,
    *,
    rows: int,
    width: int,
    num_samples: float | None = None,
    kept: CheckpointCost | None = None,
) -> RenderableType:
    """Return the whole plan for a console of `width` columns: layouts, reasons, use of memory and time, the curve,
    checkpoints, and the verdict."""
    best, question = advice.best, advice.question
    cluster = question.cluster
    why_lines = [
        f"recommended: {best.layout.describe()}",
        f"  {why(advice)}",
        f"  {seen.limit}",
        *(f"  {line}" for line in faster_lines(advice)),
    ]
    why_lines += [f"  assumed: {note}" for note in (*cluster.notes, *question.model.notes)]
    why_lines += [f"  {line}" for line in (*question.learned, *width_lines(best))]
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


def _closing(advice: Advice, seen: Outlook, num_samples: float | None, kept: CheckpointCost | None) -> list[str]:
    best, cluster = advice.best, advice.question.cluster
    lines: list[str] = []
    dropped = Counter(one.layout.strategy for one in advice.rejected)
    if dropped:
        words = ", ".join(f"{count} of {name}" for name, count in dropped.most_common(6))
        lines.append(f"dropped for memory: {words} (see plan explain)")
    if kept is not None:
        lines += ["", *checkpoint_lines(kept)]
    if num_samples:
        hours = num_samples / best.samples_per_s / 3600 / (kept.time_ratio if kept is not None else 1.0)
        price = cluster.price_per_gpu_hour
        cost = "" if price is None else f", {hours * price * cluster.num_gpus:,.0f} in total"
        lines.append(f"{num_samples:,.0f} samples take {hours:,.1f} hours{cost}")
    if not best.is_trusted:
        lines.append(
            "do not rely on these values alone:  "
            + (
                "this model was not measured. A step measured on one GPU narrows the intervals: --step-time, --from-run"
                if best.kind == "unmeasured"
                else "the measured point is too different from this question"
            )
        )
    return [*lines, f"next doubling: {seen.doubling}"]


def _text(line: str) -> Text:
    """A line that is wrapped between words and keeps its indentation."""
    return Text(line, overflow="fold")


def bar_width(width: int) -> int:
    """Width of the longest bar, in characters, on a console of `width` columns."""
    return max(8, min(50, width - 34))


def _bars(parts: dict[str, float], whole: float, unit: str, room: int) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > 0.002 * whole}
    return [
        f"  {name:<16} {'#' * max(1, round(room * value / whole)):<{room}} {value:8.3g} {unit}"
        for name, value in shown.items()
    ]
