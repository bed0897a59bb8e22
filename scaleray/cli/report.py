"""`scaleray report`: write the page of a recorded run, study or sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scaleray.cli.options import Json, Uri
from scaleray.cli.output import print_json


def report(
    run: str,
    *,
    out: Path | None = None,
    uri: Uri = None,
    open_browser: Annotated[bool, Parameter(name="--open", negative="")] = False,
    json: Json = False,
) -> int:
    """Rewrite the report of a recorded training, study or sweep: one HTML page, figures as PNG, numbers as CSV.

    The page needs no network and is self-contained.

    Parameters
    ----------
    run
        Folder or bucket of the run, study or sweep, its name in the default storage path, or its id or name in MLflow.
    out
        Folder to write to; by default the run's own folder, or ./report-NAME if that is not on this machine.
    open_browser
        Open the page in a browser.
    """
    from scaleray.recording.find_record import find_run
    from scaleray.studies.any_report import write_report

    found = find_run(run, uri=uri)
    page, *others = write_report(found, out)
    print(f"{found.record.name} ({found.where})", file=sys.stderr)
    for path in others:
        print(f"also:    {path}", file=sys.stderr)
    print(f"report:  {page}", file=sys.stderr if json else sys.stdout)
    if open_browser:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    if json:
        print_json(found.record.to_dict(), written={path.name: str(path.absolute()) for path in (page, *others)})
    return 0
