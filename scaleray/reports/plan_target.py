"""Ways to a target on the terminal: batch sizes and numbers of GPUs with the time they take, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from scaleray.planner.to_target import Target, Way

WAY_COLUMNS = ("", "GPUs", "batch", "steps", "samples", "hours", "90 % interval", "GPU hours", "cost", "layout")
WAY_CAPTION = "* no other way takes both less time and fewer GPU hours; ? the gradient noise was not measured within 4 times of this batch"


def way_table(ways: Sequence[Way], target: Target, *, num_gpus: int) -> Table:
    """The frontier, and every batch size on the cluster that was asked about."""
    made = Table(title=f"time to the target; {target.words}", caption=WAY_CAPTION, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")  # fmt: skip
    rows = [dict(zip(WAY_COLUMNS, way_cells(way), strict=True)) for way in shown_ways(ways, num_gpus)]
    # samples are steps x batch: left out for a terminal of 80 columns
    columns = [name for name in WAY_COLUMNS if name != "samples" and (not name or any(row[name] for row in rows))]
    for name in columns:
        is_layout = name == "layout"
        made.add_column(
            name.replace("% ", "%\n").replace("GPU ", "GPU\n"), justify="left" if is_layout or not name else "right", no_wrap=not is_layout,
            min_width=16 if is_layout else None,
        )  # fmt: skip
    for row in rows:
        made.add_row(*(row[name] for name in columns))
    return made


def shown_ways(ways: Sequence[Way], num_gpus: int) -> list[Way]:
    """The soonest first."""
    return [way for way in ways if way.is_on_frontier or way.num_gpus == num_gpus]


def way_cells(way: Way) -> list[str]:
    """A way in the columns of the table."""
    mark = ("*" if way.is_on_frontier else "") + ("" if way.is_trusted else "?")
    gpu_hours = f"{way.gpu_hours:,.0f}" if way.gpu_hours >= 100 else f"{way.gpu_hours:.3g}"
    return [
        mark, str(way.num_gpus), str(way.batch_size), f"{way.steps:,.0f}", f"{way.samples.value:,.4g}", f"{way.hours.value:,.3g}",
        f"{way.hours.low:,.3g} to {way.hours.high:,.3g}", gpu_hours, "" if way.cost is None else f"{way.cost:,.0f}",
        way.choice.layout.describe(),
    ]  # fmt: skip
