"""`scaleray registry`: what a team has trained, measured and planned, from MLflow."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from cyclopts import App

from scaleray.cli.options import Json
from scaleray.cli.output import print_json
from scaleray.cli.run_options import Uri

registry_app = App(
    name="registry", help="Look through the experiments of a team, and learn from them.", help_format="plaintext"
)


@registry_app.command(name="list")
def list_(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    where: str | None = None,
    kind: str | None = None,
    uri: Uri = None,
    rows: int = 40,
    json: Json = False,
) -> int:
    """List runs, studies with their points, sweeps and plans, the newest first.

    Parameters
    ----------
    model
        Part of the workload's name.
    gpus
        Number of workers.
    since
        A date such as 2026-11-01, or how long ago: 12h, 7d, 2w.
    where
        A condition on fields, such as "efficiency < 0.8 and owner == anna", "not purpose is known",
        "rule in [linear, sqrt]" or "val/accuracy >= 0.97"; also on any param or metric of MLflow.
    kind
        run, profile, study, point, sweep, trial or plan, with commas; by default all but trials.
    rows
        Rows to show.
    """
    from rich.console import Console

    from scaleray.reports.terminal.record import print_whole, width_of
    from scaleray.reports.terminal.registry import registry_table
    from scaleray.reports.terminal.tables import MOST_ROWS, as_rich
    from scaleray.tracking.registry.choose import list_experiments

    kinds = kind.replace(" ", "").split(",") if kind else ()
    found = list_experiments(model=model, gpus=gpus, since=since, where=where, kinds=kinds, uri=uri)
    if json:
        print_json({"experiments": [one.to_dict() for one in found]})
        return 0
    console = Console()
    shown = found[: max(0, rows)]
    for start in range(0, len(shown), MOST_ROWS):
        table = registry_table(shown[start : start + MOST_ROWS])
        print_whole(console, as_rich(table, width=width_of(console)))
    left_out = len(found) - len(shown)
    print(f"{len(found)} experiments" + (f", {left_out} of them not shown: --rows, --json" if left_out else ""))
    return 0


@registry_app.command
def invalidate(run: str, *, reason: str, uri: Uri = None, json: Json = False) -> int:
    """Mark a run, study, sweep or point as invalid. It stays in MLflow with the reason, and nothing uses it any more.

    Parameters
    ----------
    run
        Its id or name in MLflow; of a point or trial its id.
    reason
        What was wrong, such as "the fan was off".
    """
    from scaleray.launch.study.invalidate import invalidate_experiment

    lines = invalidate_experiment(run, reason, uri=uri)
    if json:
        print_json({"run": run, "done": lines})
        return 0
    print("\n".join(lines))
    return 0


@registry_app.command
def curve(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    where: str | None = None,
    figure: str = "efficiency",
    html: Path | None = None,
    rows: int = 20,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Show a figure of the same training on the same machines by date, with changes beyond noise marked.

    Parameters
    ----------
    model
        Part of the workload's name.
    gpus
        Number of workers.
    since
        A date such as 2026-11-01, or how long ago: 12h, 7d, 2w.
    where
        A condition on fields, as of `registry list`.
    figure
        efficiency, samples_per_s, mfu, speedup or step_time_s.
    html
        File for one page with the curves.
    rows
        Newest points to show of each curve; changes are shown anyway.
    """
    from rich.console import Console

    from scaleray.cli.registry_curve import curves, write_page
    from scaleray.config.alerts import without_secrets
    from scaleray.reports.records.history import course_headline, course_table
    from scaleray.reports.terminal.record import print_whole, width_of
    from scaleray.reports.terminal.tables import as_rich

    found = curves(model=model, gpus=gpus, since=since, where=where, figure=figure, uri=uri)
    if html is not None:
        write_page(found, html, command=f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}")
    if json:
        written = {} if html is None else {"page": str(html.absolute())}
        print_json({"curves": [one.to_dict() for one in found]}, written=written)
        return 0
    console = Console()
    for course in found:
        print_whole(console, as_rich(course_table(course, rows=rows), width=width_of(console)))
    print(course_headline(found) + (f"\npage: {html}" if html is not None else ""))
    return 0


@registry_app.command
def export(
    *,
    out: Path,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    where: str | None = None,
    kind: str | None = None,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Write experiments as a Parquet table, or the measured points of studies for `scaleray plan --learn`.

    Parameters
    ----------
    out
        File to write: .parquet with all experiments, or .json with what the planner learns from.
    model
        Part of the workload's name.
    gpus
        Number of workers.
    since
        A date such as 2026-11-01, or how long ago: 12h, 7d, 2w.
    where
        A condition on fields, as of `registry list`.
    kind
        run, profile, study, point, sweep, trial or plan, with commas; by default all.
    """
    from scaleray.tracking.registry.export import export_experiments

    kinds = kind.replace(" ", "").split(",") if kind else ()
    lines = export_experiments(out, model=model, gpus=gpus, since=since, where=where, kinds=kinds, uri=uri)
    if json:
        print_json({"done": lines}, written={"table" if out.suffix == ".parquet" else "points": str(out.absolute())})
        return 0
    print("\n".join(lines))
    return 0
