"""Ways to a target as text: batch sizes and numbers of GPUs with their times, and which of them are on the Pareto
frontier."""

from collections.abc import Sequence

from scaleray.planner.answers.to_target import Way
from scaleray.records.text.study_sweep_tables import Table

WAY_COLUMNS = ("mark", "GPUs", "batch", "steps", "samples", "hours", "90 % interval", "GPU hours", "cost", "layout")
WAY_CAPTION = (
    "* no other choice takes both less time and fewer GPU hours; "
    "? the gradient noise was not measured within a factor of 4 of this batch; ! memory may not fit"
)


def way_table(ways: Sequence[Way], *, num_gpus: int, words: str = "") -> Table:
    """Table of the frontier, and of every batch size on the given cluster. words: source of the target."""
    rows = [dict(zip(WAY_COLUMNS, way_cells(way), strict=True)) for way in shown_ways(ways, num_gpus)]
    columns = tuple(name for name in WAY_COLUMNS if any(row[name] for row in rows))
    title = f"time to the target; {words}" if words else "Batch sizes and numbers of GPUs"
    return Table(title, columns, tuple(tuple(row[name] for name in columns) for row in rows), (f"{WAY_CAPTION}.",))


def shown_ways(ways: Sequence[Way], num_gpus: int) -> list[Way]:
    """The ways to show: the frontier, and all on `num_gpus` GPUs, fastest first."""
    return [way for way in ways if way.is_on_frontier or way.num_gpus == num_gpus]


def way_cells(way: Way) -> list[str]:
    """Cells of a way in the table."""
    mark = (
        ("*" if way.is_on_frontier else "")
        + ("" if way.is_trusted else "?")
        + ("" if way.choice.fits == "fits" else "!")
    )
    gpu_hours = f"{way.gpu_hours:,.0f}" if way.gpu_hours >= 100 else f"{way.gpu_hours:.3g}"
    return [
        mark,
        str(way.num_gpus),
        str(way.batch_size),
        f"{way.steps:,.0f}",
        f"{way.samples.value:,.4g}",
        f"{way.hours.value:,.3g}",
        f"{way.hours.low:,.3g} to {way.hours.high:,.3g}",
        gpu_hours,
        "" if way.cost is None else f"{way.cost:,.0f}",
        way.choice.layout.describe(),
    ]
