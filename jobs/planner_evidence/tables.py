"""How good the planner is, as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jobs.planner_evidence.published.rows import Skipped
from jobs.planner_evidence.transfers import TransferScore
from jobs.planner_evidence.validate import Score
from scaleray.records.text.study_sweep_tables import Table


def score_table(title: str, lines: Sequence[Score]) -> Table:
    """Validation, a line for each source or family. Errors in percent of the step time, efficiency in points."""
    columns = (
        "",
        "rows",
        "data sheets",
        "anchored rows",
        "one point",
        "trivial",
        "bends",
        "ours/trivial",
        "eff. pts",
        "Pollux (ours)",
        "memory",
        "OOM",
        "inside %",
        "rank",
        "regret %",
    )
    rows = tuple(
        (
            line.name,
            str(line.num_sheets),
            _pair(line.sheets_median, line.sheets_p90),
            str(line.num_anchored),
            _pair(line.anchored_median, line.anchored_p90),
            _pair(line.trivial_median, line.trivial_p90),
            str(line.num_bending),
            _pair(line.bending_mean, line.bending_trivial_mean),
            _points(line.efficiency_median_points),
            ""
            if line.pollux_median is None
            else f"{_percent(line.pollux_median)} ({_percent(line.anchored_where_pollux_median)})",
            f"{_pair(line.memory_median, line.memory_p90)} of {line.num_memory}" if line.num_memory else "",
            f"{line.num_out_of_memory_right}/{line.num_out_of_memory}" if line.num_out_of_memory else "",
            _percent(line.inside_share, 0),
            "" if line.rank_correlation is None else f"{line.rank_correlation:.2f}",
            _percent(line.regret),
        )
        for line in lines
    )
    note = (
        "Errors in % of step time: median / 90th percentile. "
        "trivial: throughput per GPU stays that of the smallest point."
    )
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
            line.words,
            str(line.num_rows),
            str(line.num_sources),
            _percent(line.error_median),
            _percent(line.inside_share, 0),
            _percent(line.inside_by_source, 0),
            _percent(line.near_share, 0),
            _percent(line.near_by_source, 0),
            "" if line.width_median is None else f"{line.width_median:.2f}",
        )
        for line in lines
    )
    note = (
        "Rows inside the stated 90% interval; near's interval: what would be stated if the distance were not known. "
        "error: median. "
        "interval: its upper end over its lower one, median."
    )
    return Table("intervals far from what was measured", columns, rows, (note,))


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Rows that were not judged, grouped by reason."""
    groups = Counter((one.source, one.reason) for one in skipped)
    return [f"{count:5d} rows of {source}: {reason}" for (source, reason), count in sorted(groups.items())]


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f}"


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _pair(first: float | None, second: float | None) -> str:
    return "" if first is None else f"{_percent(first)} / {_percent(second)}"
