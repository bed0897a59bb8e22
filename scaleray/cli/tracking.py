"""`scaleray tracking`: repair records in MLflow, open its pages, and show a team's results over time."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from cyclopts import App

from scaleray.cli.options import Json, Uri
from scaleray.cli.output import print_json

tracking_app = App(
    name="tracking", help="MLflow's pages, figures over time, repair of records.", help_format="plaintext"
)


@tracking_app.command
def replay(file: Path, *, uri: str | None = None, json: Json = False) -> int:
    """Send to MLflow the records of a run, study or sweep that could not be written while the server was away.

    Parameters
    ----------
    file
        A run folder's unsent.jsonl, or the record.json of a study or sweep.
    uri
        Tracking URI, if the server has moved or its address contains a password.
    """
    from scaleray.recording.replay import replay as run

    count = run(file, uri=uri)
    if json:
        print_json({"complete": True} if count is None else {"complete": True, "sent": count})
    elif count is None:
        print(f"MLflow now has everything in {file}")
    else:
        print(f"sent {count} operations; {file} is no longer needed and has been removed")
    return 0


@tracking_app.command
def ui(*, uri: str | None = None, port: int = 5000) -> int:
    """Open MLflow's pages, only on this machine, for runs in a database file. Ctrl-C ends it.

    Parameters
    ----------
    uri
        Tracking URI; by default that of `scaleray train`.
    port
        Port on 127.0.0.1.
    """
    from scaleray.recording.ui import tracking_ui

    return tracking_ui(uri=uri, port=port)


@tracking_app.command
def invalidate(run: str, *, reason: str, uri: Uri = None, json: Json = False) -> int:
    """Mark a run, study, sweep or point as invalid. It stays in MLflow with the reason, but is no longer used.

    Parameters
    ----------
    run
        Its id or name in MLflow; for a point or trial its id.
    reason
        The fault, such as "the fan was off".
    """
    from scaleray.studies.invalidate import invalidate_experiment

    lines = invalidate_experiment(run, reason, uri=uri)
    if json:
        print_json({"run": run, "done": lines})
        return 0
    print("\n".join(lines))
    return 0


@tracking_app.command
def curve(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    figure: str = "efficiency",
    html: Path | None = None,
    rows: int = 20,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Show a metric of the same training on the same machines by date, marking changes beyond noise.

    Parameters
    ----------
    model
        Part of the workload's name.
    gpus
        Number of workers.
    since
        Date such as 2026-11-01, or age: 12h, 7d, 2w.
    figure
        efficiency, samples_per_s, mfu, speedup or step_time_s.
    html
        File for a page with the curves.
    rows
        Number of newest points to show per curve; changes are always shown.
    """
    from rich.console import Console

    from scaleray.config.alerts import without_secrets
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich
    from scaleray.studies.history_page import experiment_curves, history_headline, history_table

    command = f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}"
    found = experiment_curves(model=model, gpus=gpus, since=since, figure=figure, html=html, uri=uri, command=command)
    if json:
        written = {} if html is None else {"page": str(html.absolute())}
        print_json({"curves": [one.to_dict() for one in found]}, written=written)
        return 0
    console = Console()
    for history in found:
        print_whole(console, as_rich(history_table(history, rows=rows), width=width_of(console)))
    print(history_headline(found) + (f"\npage: {html}" if html is not None else ""))
    return 0
