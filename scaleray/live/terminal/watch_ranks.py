"""Activity, lateness and memory of each rank; of many ranks, only the notable ones."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from scaleray.records.live_state import LiveState, RankNow
from scaleray.records.phases import in_words
from scaleray.records.text import units

MOST_RANKS = 8
LATE_SHARE = 0.05
"""Share of a step from which lateness is highlighted."""
SILENT_S = 5.0
"""Seconds of silence from which it is shown."""
NARROW = 60


def ranks_table(state: LiveState, *, width: int) -> Table:
    """Table with one row per rank; of many ranks, only the silent, late and delayed ones, and the first few."""
    is_narrow = width < NARROW
    has_late = any(rank.late_s is not None for rank in state.ranks)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("rank", *(["node"] if not is_narrow else []), "step", *(["late"] if has_late else [])):
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    if not is_narrow:
        table.add_column("step time", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    if not state.has_ended:
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
    shown = worth_showing(state)
    for rank in shown:
        table.add_row(*_cells(rank, state, is_narrow=is_narrow, has_late=has_late))
    if rest := len(state.ranks) - len(shown):
        table.caption = f"{rest:,} more ranks{_others(state, shown)}"
    return table


def worth_showing(state: LiveState) -> list[RankNow]:
    """The ranks to show first, in rank order."""
    ranks = sorted(state.ranks, key=lambda rank: (-_silence(rank), rank.step, -(rank.late_s or 0.0), rank.rank))
    return sorted(ranks[:MOST_RANKS], key=lambda rank: rank.rank)


def _others(state: LiveState, shown: list[RankNow]) -> str:
    named = {rank.rank for rank in shown}
    late = [rank.late_s for rank in state.ranks if rank.rank not in named and rank.late_s is not None]
    return f", none later than {units.seconds(max(late))}" if late else ""


def _cells(rank: RankNow, state: LiveState, *, is_narrow: bool, has_late: bool) -> list[Text]:
    step_s = rank.step_time_s or state.step_time_s or 0.0
    is_late = rank.late_s is not None and step_s > 0 and rank.late_s / step_s >= LATE_SHARE
    cells = [Text(str(rank.rank))]
    if not is_narrow:
        cells.append(Text(rank.node))
    step = state.step if state.status == "FINISHED" else rank.step  # the last sample of a rank may be older
    cells.append(Text(f"{step:,}"))
    if has_late:
        cells.append(Text(units.seconds(rank.late_s) if rank.late_s else "-", style="bold yellow" if is_late else ""))
    if not is_narrow:
        cells.append(Text(units.seconds(rank.step_time_s)))
        cells.append(Text(units.memory(rank.memory.get("peak_bytes") or rank.memory.get("resident_bytes"))))
    if not state.has_ended:
        cells.append(_doing(rank))
    return cells


def _doing(rank: RankNow) -> Text:
    if rank.silent_s >= SILENT_S:
        return Text(f"silent for {rank.silent_s:.0f} s", style="bold red")
    words = in_words(rank.phase, rank.step)
    return Text(f"{words} for {rank.since_s:.0f} s" if rank.since_s >= SILENT_S else words)


def _silence(rank: RankNow) -> float:
    return rank.silent_s if rank.silent_s >= SILENT_S else 0.0
