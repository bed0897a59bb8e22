"""Ways to a target on the terminal: batch sizes and numbers of GPUs with the time they take, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from scaleray.planner.to_target import Target, Way

WAY_COLUMNS = ("GPUs", "batch", "steps", "samples", "hours", "90 % interval", "GPU hours", "cost", "layout", "")
WAY_CAPTION = "* no other way takes both less time and fewer GPU hours; ? the gradient noise was not measured within 4 times of this batch"


def way_table(ways: Sequence[Way], target: Target, *, num_gpus: int) -> Table:
    """The frontier, and every batch size on the cluster that was asked about."""
    made = Table(title=f"time to the target; {target.words}", caption=WAY_CAPTION, box=box.SIMPLE, padding=(0, 1), title_justify="left", caption_justify="left")  # fmt: skip
    for name in WAY_COLUMNS:
        made.add_column(name, justify="left" if name in ("layout", "") else "right", no_wrap=True)
    for way in shown_ways(ways, num_gpus):
        made.add_row(*way_cells(way))
    return made


def shown_ways(ways: Sequence[Way], num_gpus: int) -> list[Way]:
    """The soonest first."""
    return [way for way in ways if way.is_on_frontier or way.num_gpus == num_gpus]


def way_cells(way: Way) -> list[str]:
    """A way in the columns of the table."""
    return [
        str(way.num_gpus), str(way.batch_size), f"{way.steps:,.0f}", f"{way.samples.value:,.4g}", f"{way.hours.value:,.4g}",
        f"{way.hours.low:,.3g} to {way.hours.high:,.3g}", f"{way.gpu_hours:,.4g}", "" if way.cost is None else f"{way.cost:,.0f}",
        way.choice.layout.describe(), ("*" if way.is_on_frontier else "") + ("" if way.is_trusted else "?"),
    ]  # fmt: skip
