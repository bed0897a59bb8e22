"""Watched runs, one line each: printed as they progress if the output is a pipe, or all in a table."""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaleray.common.printed import printable
from scaleray.live.terminal.watch_page import SEVERITIES, STYLES, result_of
from scaleray.records.live_state import LiveState
from scaleray.records.terminal.progress_line import duration
from scaleray.records.text import units

NARROW = 72
SHOWN_OF_ID = 8
"""Number of letters of an id that distinguish runs of the same name."""


def state_line(state: LiveState) -> str:
    """State of a run on one line, in the format of the lines that a training prints."""
    parts = [f"{state.name} {state.status}", _how_far(state)]
    if result := result_of(state):
        parts.append(result)
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.samples_per_s:
        parts.append(f"{units.count(state.samples_per_s)} samples/s")
    late = [rank for rank in state.ranks if rank.late_s]
    if late:
        worst = max(late, key=lambda rank: rank.late_s or 0.0)
        parts.append(f"rank {worst.rank} {units.seconds(worst.late_s)} late")
    if state.left_s is not None:
        parts.append(f"about {duration(state.left_s)} left")
    if state.has_ended and state.verdict:
        parts.append(state.verdict.splitlines()[0])
    parts += [f"{alert.severity}: {alert.summary}" for alert in state.firing]
    return " | ".join(printable(part) for part in parts if part)


def runs_table(states: Sequence[LiveState], *, width: int) -> RenderableType:
    """Table with one row per run, followed by alerts and reasons for failures."""
    if not states:
        return Text("no run is active here, and none has ended within the last hour")
    is_narrow, names = width < NARROW, _names(states)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("run", "status", "done", *([] if is_narrow else ["result", "samples/s"]), "left"):
        table.add_column(name, justify="left" if name in ("run", "status", "result") else "right", overflow="fold")
    for state in states:
        style = STYLES.get(state.status, "")
        loss = f"loss {units.figure(state.loss)}" if state.loss is not None else ""
        figures = [] if is_narrow else [printable(result_of(state) or loss), units.count(state.samples_per_s)]
        left = duration(state.left_s) if state.left_s is not None else ""
        table.add_row(Text(names[id(state)]), Text(state.status, style=style), _share(state), *figures, left)
    alerts = [
        Text(f"{names[id(state)]}: {printable(alert.summary)}", style=SEVERITIES.get(alert.severity, "cyan"))
        for state in states
        for alert in state.firing
    ]
    reasons = [
        Text(f"{names[id(state)]}: {printable(state.verdict.splitlines()[0])}", style=STYLES.get(state.status, ""))
        for state in states
        if state.status == "FAILED" and state.verdict
    ]
    return Group(table, *reasons, *alerts)


def _names(states: Sequence[LiveState]) -> dict[int, str]:
    """Names of states by identity; runs of the same name also get the beginning of their id, or their folder."""
    counts = Counter(state.name for state in states)
    return {
        id(state): printable(state.name if counts[state.name] == 1 else f"{state.name} ({_which(state)})")
        for state in states
    }


def _which(state: LiveState) -> str:
    return state.run_id[:SHOWN_OF_ID] or state.run_dir or "?"


def _how_far(state: LiveState) -> str:
    if state.unit and state.total:
        return f"{state.done or 0:,.0f} of {state.total:,.0f} {state.unit}"
    return f"step {state.step}/{state.total_steps or '?'}" if state.kind == "train" else ""


def _share(state: LiveState) -> str:
    done, total = (state.done or 0.0, state.total) if state.unit else (state.step, state.total_steps)
    return f"{done / total:.0%}" if total else f"{done:,.0f}" if done else ""
