"""`scaleray tracking`: what MLflow lacks, and its pages."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from scaleray.cli.options import Json
from scaleray.cli.output import print_json

tracking_app = App(name="tracking", help="Look at recorded runs, and repair records.", help_format="plaintext")


@tracking_app.command
def replay(file: Path, *, uri: str | None = None, json: Json = False) -> int:
    """Send to MLflow what a run, study or sweep could not write while the server was away.

    Parameters
    ----------
    file
        A run folder's unsent.jsonl, or the record.json of a study or sweep.
    uri
        Tracking URI, if the server has moved or its address holds a password.
    """
    from scaleray.recording.send import replay as run

    count = run(file, uri=uri)
    if json:
        print_json({"complete": True} if count is None else {"complete": True, "sent": count})
    elif count is None:
        print(f"MLflow has everything of {file} now")
    else:
        print(f"sent {count} operations; {file} is no longer needed and has been removed")
    return 0


@tracking_app.command
def ui(*, uri: str | None = None, port: int = 5000) -> int:
    """Open MLflow's pages on this machine only, for runs in a database file. Ctrl-C ends it.

    Parameters
    ----------
    uri
        Tracking URI; by default the one that `scaleray train` uses.
    port
        Port on 127.0.0.1.
    """
    from scaleray.recording.ui import tracking_ui

    return tracking_ui(uri=uri, port=port)
