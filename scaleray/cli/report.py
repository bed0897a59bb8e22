"""`scaleray report`: a recorded run, study or sweep as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scaleray.cli.output import print_json


def report(
    run: str,
    *,
    out: Path | None = None,
    uri: str | None = None,
    open_browser: Annotated[bool, Parameter(name="--open", negative="")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Write the report of a recorded training, study or sweep again: one HTML page, its figures as PNG, its numbers as
    CSV.

    The page needs no network and can be passed on as it is.

    Parameters
    ----------
    run
        Folder or bucket of the run, study or sweep, its name in the default storage path, or its id or name in MLflow.
    out
        Folder to write into; the run's own folder, or ./report-NAME where that is not on this machine.
    uri
        MLflow's tracking URI, for a run that is found there.
    open_browser
        Show the page in a browser.
    json
        Print the record as JSON on stdout; everything else goes to stderr.
    """
    from scaleray.reports.records.any import write_report
    from scaleray.tracking.find_record import find_run

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
