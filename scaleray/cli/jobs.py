"""`scaleray jobs`: list the jobs of a cluster, show their output, and stop them."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated

from cyclopts import App, Parameter

from scaleray.cli.options import Flag, Json
from scaleray.cli.output import STOPPED, print_json

jobs_app = App(name="jobs", help="Jobs of a remote cluster.", help_format="plaintext")
To = Annotated[
    str | None,
    Parameter(
        help="Ray dashboard, http://HOST:8265, or the name of a Ray, Kubernetes or Slurm cluster in "
        "~/.config/scaleray/clusters.yaml; by default the dashboard in RAY_API_SERVER_ADDRESS."
    ),
]


@jobs_app.command(name="list")
def list_(*, to: To = None, json: Json = False) -> int:
    """List the jobs submitted to a cluster, newest first."""
    from scaleray.clusters.submit.submit import list_jobs

    found = list_jobs(to)
    if json:
        print_json({"jobs": [dataclasses.asdict(job) for job in found]})
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scaleray.records.terminal.progress_line import duration

    if not found:
        print("no jobs were submitted to this cluster")
        return 0
    rows = []
    for job in found:
        began = time.strftime("%m-%d %H:%M", time.localtime(job.started_at)) if job.started_at else ""
        took = duration((job.ended_at or time.time()) - job.started_at) if job.started_at else ""
        rows.append((job.name, job.status, began, took, job.entrypoint))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    names = ("job", "status", "began", "took")
    widths = [max(len(row[number]) for row in (names, *rows)) for number in range(len(names))]
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, no_wrap=True, width=width)
    others = sum(width + 3 for width in widths)  # including column separators; rich would shorten them
    left = max(Console().width - others, 20)
    table.add_column("command", no_wrap=True, overflow="ellipsis", max_width=left)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=others + left).print(table)
    return 0


@jobs_app.command
def logs(job: str, *, to: To = None, follow: Flag = False) -> int:
    """Print the output of a job.

    Parameters
    ----------
    follow
        Follow it until it ends; exit code 1 if it failed. Ctrl-C leaves the job running, with exit code 130.
    """
    from scaleray.clusters.submit.submit import job_logs, jobs_of

    if not follow:
        sys.stdout.write(job_logs(job, to=to))
        return 0
    jobs = jobs_of(to)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        ended = jobs.follow(job, write, lambda text: print(text, file=sys.stderr))
    except KeyboardInterrupt:
        print(f"job {job} continues", file=sys.stderr)
        return STOPPED
    return 0 if ended.status == "SUCCEEDED" else 1


@jobs_app.command
def stop(job: str, *, to: To = None, json: Json = False) -> int:
    """Stop a job: a training saves its state first, and can be resumed."""
    from scaleray.clusters.submit.submit import stop_job

    now = stop_job(job, to=to)
    if json:
        print_json(dataclasses.asdict(now))
    else:
        print(f"job {job} was asked to stop; it is {now.status}")
    return 0
