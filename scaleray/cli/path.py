"""`scaleray path`: guided steps from a baseline on one worker to a promoted model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides
from scaleray.cli.output import Output, print_json
from scaleray.errors import UsageError

if TYPE_CHECKING:
    from scaleray.records.path_record import PathRecord, PathTask
    from scaleray.records.text.study_sweep_tables import Table

path_app = App(
    name="path", help="Go from a baseline on one worker to a promoted model, step by step.", help_format="plaintext"
)
INCONCLUSIVE = 3
Name = Annotated[
    str | None, Parameter(help="Name or folder of the path; by default the only one in the default storage path.")
]


@path_app.command
def start(
    *overrides: Overrides,
    config: ConfigFile = None,
    target: str,
    workers: int,
    runs: int = 5,
    name: str | None = None,
    model: str | None = None,
    policy: Path | None = None,
    cluster: str | None = None,
    kind: Literal["local", "kubernetes", "slurm", "ray-up"] = "local",
    soak: str | None = None,
    local: Flag = False,
    json: Json = False,
) -> int:
    """Begin a path. Config keys can be given as options, as for train.

    Parameters ---------- target Target of the model, such as "test/accuracy >= 0.97". workers Number of workers of the
    distributed training. runs Number of trainings per side, each with its own seed. name Name of the path; by default
    that of the experiment. model Name of the model in MLflow's registry; by default that of the path. policy YAML file
    with the requirements of the gates. cluster Cluster for the planner's advice, in the notation of scaleray plan, such
    as h100:8x2. kind Type of cluster on which the promoted model's pipeline retrains it. soak Length of the long
    training, such as "30 epochs"; by default three times that of the job. local Run without Ray where possible:
    everything except trainings with several workers and the sweep.
    """
    if config is None:
        raise UsageError.problem("Give", "a config with -c FILE", "scaleray path start -c FILE --target ...")
    from scaleray.release.path.path_state import start_path

    path = start_path(
        config,
        target,
        workers=workers,
        runs=runs,
        name=name,
        model=model,
        policy=policy,
        cluster=cluster,
        kind=kind,
        soak=soak,
        local=local,
        overrides=overrides,
    )
    return _shown(path, json=json)


@path_app.command(name="next")
def next_(
    *,
    name: Name = None,
    until: str | None = None,
    only_print: Annotated[Flag, Parameter(name="--print")] = False,
    json: Json = False,
) -> int:
    """Do the next task; if a person must decide, print the question.

    Exit code 0 if it is done, 1 if its command failed, 3 if gates are inconclusive or a person must decide.

    Parameters
    ----------
    until
        Continue until this step is done: baseline, distribute, optimise, validate or produce.
    only_print
        Do nothing; print the command of the next task, or with --until of all that are known so far.
    """
    from scaleray.release.path.go import next_on_path

    if only_print:
        return _printed(name, until, json=json)
    path = next_on_path(name, until=until, say=Output(json=True).say)
    _shown(path, json=json)
    following = path.next_task()
    if following is None:
        return 0
    if following.status == "failed":
        return INCONCLUSIVE if following.exit_code == INCONCLUSIVE else 1
    return INCONCLUSIVE if following.act == "decide" and (until is None or following.step == until) else 0


@path_app.command
def skip(task: str, *, reason: str, name: Name = None, json: Json = False) -> int:
    """Skip a task.

    Parameters
    ----------
    reason
        Reason shown in the status.
    """
    from scaleray.release.path.go import skip_on_path

    return _shown(skip_on_path(task, reason, name=name), json=json)


@path_app.command
def redo(task: str, *, reason: str = "", name: Name = None, json: Json = False) -> int:
    """Reopen a task and those after it; the runs of its trainings are set aside.

    Parameters
    ----------
    reason
        Reason shown in the status.
    """
    from scaleray.release.path.go import redo_on_path

    return _shown(redo_on_path(task, reason, name=name), json=json)


@path_app.command
def status(*, name: Name = None, json: Json = False) -> int:
    """Show the progress of a path, and every task with its result."""
    from scaleray.release.path.path_state import find_path

    return _shown(find_path(name), json=json, tables=True)


def _printed(name: str | None, until: str | None, *, json: bool) -> int:
    """Print the commands of the next tasks."""
    from scaleray.release.path.go import steps_ahead

    tasks = steps_ahead(name, until=until)
    if json:
        print_json({"tasks": [{"key": one.key, "what": one.what, "command": one.shell} for one in tasks]})
    else:
        for task in tasks:
            print(f"# {task.key}: {task.what}")
            print(task.shell or f"# {task.words or 'scaleray path next does it'}")
        if not tasks:
            print("# the path is complete")
    return INCONCLUSIVE if tasks and tasks[-1].act == "decide" else 0


def _shown(path: PathRecord, *, json: bool, tables: bool = False) -> int:
    """Show a path. tables: include all its tasks."""
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich

    output = Output(json=json)
    for table in path_tables(path) if tables else ():
        print_whole(output.console, as_rich(table, width=width_of(output.console)))
    for line in path.lines():
        output.say(line)
    if json:
        print_json(path.to_dict(), written={"folder": path.folder})
    return 0


def path_tables(path: PathRecord) -> list[Table]:
    """Tables of the tasks of each step, and one of the decisions."""
    from scaleray.records.path_record import STEPS
    from scaleray.records.text.study_sweep_tables import Table

    heads = ("task", "state", "began", "took", "by", "result")
    found = [
        Table(step, heads, tuple(_row(task) for task in path.tasks if task.step == step), has_words=True)
        for step in STEPS
    ]
    rows = tuple((one.what, _when(one.at), one.by, one.why) for one in path.decisions)
    return [*found, Table("decisions", ("decision", "when", "by", "reason"), rows, has_words=True)] if rows else found


def _row(task: PathTask) -> tuple[str, ...]:
    from scaleray.records.text.units import seconds

    took = "" if task.duration_s is None else seconds(task.duration_s)
    name = task.key.partition("/")[2]
    return (name, task.status, _when(task.started_at), took, task.by, task.words or task.what)


def _when(at: float | None) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(at)) if at else ""
