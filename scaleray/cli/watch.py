"""`scaleray watch`: follow a run, or all runs, while they train."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scaleray.cli.options import Flag
from scaleray.cli.output import print_json
from scaleray.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from scaleray.records.live_state import LiveState

LEAST_S = 0.2
PIPE_S = 10.0
"""Seconds between two lines in a pipe."""


def watch(
    run: str | None = None,
    *,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    once: Flag = False,
    json: Annotated[bool, Parameter(name="--json", negative="", help="Print the state as JSON on stdout.")] = False,
    interval: float | None = None,
    uri: str | None = None,
) -> int:
    """Watch a run: progress, loss, speed, phases, lateness and memory of each rank, alerts.

    It reads the run's folder on this machine, its recorder in the cluster of RAY_ADDRESS, or MLflow, without affecting
    the run. It ends with the run, or by Ctrl-C, which leaves the run alone. In a pipe it prints lines at intervals.

    Parameters
    ----------
    run
        Folder of the run, its name in the default storage path or in the cluster, or its id or name in MLflow.
    all_
        All runs on this machine and the cluster that are running, or ended within the last hour.
    once
        Show the state once, then exit.
    interval
        Seconds between two updates; 2 on a terminal, 10 in a pipe.
    uri
        MLflow's tracking URI, for a run recorded there.
    """
    if run is None and not all_:
        raise UsageError.problem("Give", "a RUN, or --all", "for example: scaleray watch digits-w002")
    if run is not None and all_:
        raise UsageError.problem("RUN", "cannot be combined with --all", "omit one of them")
    if interval is not None and not LEAST_S <= interval < float("inf"):
        raise ConfigError("--interval", interval, f"it must be at least {LEAST_S} seconds")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode
    with contextlib.ExitStack() as stack:
        try:
            read_state, where, least_s = _watched(run, stack, uri)
            if once:
                return _print_once(read_state(), where, json=json)
            is_terminal = sys.stdout.isatty() and not json
            every_s = max(least_s, interval or (2.0 if is_terminal else PIPE_S))
            if is_terminal:
                return _show(read_state, where, every_s)
            return _print_lines(read_state, every_s, json=json)
        except KeyboardInterrupt:
            print("stopped watching; the run continues" if run else "stopped watching", file=sys.stderr)
            return 0


ReadState = Callable[[], "LiveState | list[LiveState]"]


def _watched(run: str | None, stack: contextlib.ExitStack, uri: str | None) -> tuple[ReadState, str, float]:
    from scaleray.launch.watch.find import find_watched, watched_runs

    if run is None:
        return watched_runs(stack), "", 0.0
    found = find_watched(run, stack, uri=uri)
    return found.look, found.where, found.least_s


def _print_once(seen: LiveState | list[LiveState], where: str, *, json: bool) -> int:
    if json:
        print_json({"runs": [state.to_dict() for state in seen]} if isinstance(seen, list) else seen.to_dict())
        return 0
    from rich.console import Console

    console = Console()
    console.print(_view(seen, where, console.width))
    return 0


def _view(seen: LiveState | list[LiveState], where: str, width: int) -> Any:
    from scaleray.live.terminal.watch_lines import runs_table
    from scaleray.live.terminal.watch_page import watch_page

    return runs_table(seen, width=width) if isinstance(seen, list) else watch_page(seen, width=width, where=where)


def _show(read_state: ReadState, where: str, every_s: float) -> int:
    """Show the page on a terminal, updated in place; the last state stays visible."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            seen = read_state()
            live.update(_view(seen, where, console.width), refresh=True)
            if not isinstance(seen, list) and seen.has_ended:
                return 0
            time.sleep(every_s)


def _print_lines(read_state: ReadState, every_s: float, *, json: bool) -> int:
    """Print lines in a pipe, one for each update of the run's state."""
    from scaleray.live.terminal.watch_lines import state_line

    before: dict[tuple[str, ...], str] = {}
    while True:
        seen = read_state()
        for state in seen if isinstance(seen, list) else [seen]:
            line, run = state_line(state), (state.name, state.run_id, state.run_dir)
            if before.get(run) != line:
                before[run] = line
                if json:
                    print_json(state.to_dict(), in_a_line=True)
                else:
                    print(line, flush=True)
        if not isinstance(seen, list) and seen.has_ended:
            return 0
        sys.stdout.flush()
        time.sleep(every_s)
