"""`scaleray`: one noun a command. Exit codes: 0 done, 1 failed, 2 bad usage; 3 of `compare`, see there."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psutil
from cyclopts import App, CycloptsError, Parameter

from scaleray import __version__
from scaleray.cli.checkpoint import checkpoint_app
from scaleray.cli.compare import compare
from scaleray.cli.plan import plan_app
from scaleray.cli.report import report
from scaleray.cli.study import study
from scaleray.cli.sweep import sweep
from scaleray.cli.verify import verify
from scaleray.errors import ScaleRayError

app = App(
    name="scaleray",
    version=__version__,
    help="Take a PyTorch recipe from one GPU to many, and prove each step.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # a stopped run says so, and exits with 1
)
config_app = App(name="config", help="Look at configs.", help_format="plaintext")
tracking_app = App(name="tracking", help="Look at recorded runs, and repair records.", help_format="plaintext")
app.command(config_app)
app.command(tracking_app)
app.command(checkpoint_app)
for command in (verify, study, sweep, plan_app, compare, report):
    app.command(command)

ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")]
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", help="Print the record as JSON on stdout; everything else goes to stderr."),
]


@app.command
def train(
    *overrides: Overrides,
    config: ConfigFile = None,
    resume: str | None = None,
    allow_change: tuple[str, ...] = (),
    local: bool = False,
    json: Json = False,
) -> int:
    """Train a workload on Ray: a local cluster, or the one of RAY_ADDRESS.

    Every key of the config can be given as an option, for example --scale.workers 2 --batch.global-size 64;
    `scaleray config keys` lists them. Options win over SCALERAY_ environment variables, those over the file.

    Parameters
    ----------
    resume
        Continue an interrupted run after its newest checkpoint: its folder, its name, or `auto` for the newest
        unfinished run of the same training, if there is one. Without -c, the config is that run's own.
    allow_change
        A key whose change alters the training, and which may differ from the interrupted run's all the same.
    local
        Run in this process without Ray, for a debugger.
    """
    from rich.console import Console

    from scaleray.config import load_config
    from scaleray.reports.terminal.live import Terminal, final_lines

    if config is None and resume is not None and resume != "auto":
        from scaleray.launch.run.resume import config_of

        resolved = config_of(resume, overrides)
    else:
        resolved = load_config(config, flags=overrides)
    terminal = Terminal(Console(stderr=json), interval_s=resolved.tracking.interval_s)
    # what the workload prints, here or in a worker, must not mix with the record
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext(), terminal:
        from scaleray.launch.run.train import train as run

        record = run(
            resolved,
            resume=resume,
            allow_change=allow_change,
            local=local,
            show=terminal.show,
            say=terminal.say,
            expect_steps=terminal.expect_steps,
            base_dir=config.resolve().parent
            if config
            else None,  # what a user waits for counts from the start of the process
            started_at=psutil.Process().create_time(),
        )
    for line in final_lines(record):
        terminal.say(line)
    if json:
        print(record.to_json())
    return 0


@config_app.command
def show(*overrides: Overrides, config: ConfigFile = None, json: Json = False, data: bool = True) -> int:
    """Print the resolved config and every derived value with how it was derived.

    Parameters
    ----------
    data
        Load the workload's data, which the number of steps depends on. --no-data leaves those values out.
    """
    import json as json_library

    import yaml

    from scaleray.config import load_config
    from scaleray.scaling.recipe.derive import derive
    from scaleray.scaling.recipe.values import DataSize

    resolved = load_config(config, flags=overrides)
    size: DataSize | None = None
    if data:
        from scaleray.launch.session.data import load_sources, size_of
        from scaleray.workload import load_workload

        base_dir = config.resolve().parent if config else None
        size = size_of(load_sources(load_workload(resolved.workload.name, resolved.workload.args, base_dir=base_dir)))
    values: dict[str, Any] = {}
    explanations: dict[str, str] = {}
    if size is not None:
        recipe = derive(resolved, size)
        values, explanations = recipe.values(), recipe.explanations
    if json:
        print(
            json_library.dumps(
                {"config": resolved.to_dict(), "hash": resolved.hash(), "derived": values, "how": explanations},
                indent=2,
            )
        )
        return 0
    print(yaml.safe_dump(resolved.to_dict(), sort_keys=False), end="")
    print(f"\n# config hash {resolved.hash()}")
    if size is None:
        print("# derived values need the data: leave out --no-data")
    else:
        print(f"# derived, for {size.num_samples} training samples")
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        text = (
            ", ".join(f"{v:.6g}" for v in value)
            if isinstance(value, tuple)
            else f"{value:.6g}"
            if isinstance(value, float)
            else str(value)
        )
        print(f"# {name:<{width}}  {text:<12}  {explanations.get(name, '')}")
    return 0


@config_app.command
def keys(*, json: Json = False) -> int:
    """List every key of the config with its type, default and meaning."""
    import dataclasses
    import json as json_library
    import textwrap

    from scaleray.config.reference import key_rows

    rows = key_rows()
    if json:
        print(json_library.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    for row in rows:
        print(f"{row.key}  {row.type} = {row.default}")
        print(textwrap.fill(row.meaning, width=100, initial_indent="    ", subsequent_indent="    "))
    return 0


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
    if file.name == "record.json":
        from scaleray.errors import TrackingError
        from scaleray.tracking.study_runs import send_record

        if lacks := send_record(file, uri=uri):
            raise TrackingError("MLflow", "not complete", f"{lacks}", "run this again when it is back")
        print('{"complete": true}' if json else f"MLflow has everything of {file} now")
        return 0
    from scaleray.tracking.store import replay as send

    count = send(file, uri=uri)
    print(
        f'{{"sent": {count}}}' if json else f"sent {count} operations; {file} is no longer needed and has been removed"
    )
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
    from scaleray.tracking.ui import serve

    return serve(uri, port=port)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    _make_early_ends_failures()
    try:
        code = run_command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        # whoever read the output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it exits
        code = 1
    sys.exit(code)


def _has_lost_its_reader(output: int) -> bool:
    """Whether this end of a pipe has nobody at the other one."""
    watch = select.poll()
    watch.register(output, 0)
    return any(state & select.POLLERR for _, state in watch.poll(0))


def _make_early_ends_failures() -> None:
    """Make os._exit(0) of user code in this process a failure, so that it does not look like a command that is done."""
    real, own = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == own and status == 0:  # in children of a fork it is how they end
            os.write(2, b"RunFailedError: the command was ended by a call of os._exit(0) before it was done\n")
            status = 1
        real(status)

    os._exit = end


def run_command(arguments: list[str]) -> int:
    """The exit code of a command line; errors that were raised on purpose print one message and no traceback."""
    if nul := next((word for word in arguments if "\0" in word), None):
        return _fail(f"UsageError: an argument is {nul!r:.200}, but no argument can hold a NUL character", 2)
    try:
        result: Any = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except CycloptsError as exc:
        return _fail(f"{type(exc).__name__.removesuffix('Error')}: {exc}\n  see scaleray --help", 2)
    except ScaleRayError as exc:
        return _fail(f"{type(exc).__name__}: {exc}", exc.exit_code)
    except SystemExit as exc:  # raised by user code, in a place that nobody thought of: nothing of ours calls it
        return _fail(f"RunFailedError: the command was ended by a call of sys.exit({exc.code!r}) before it was done", 1)
    except KeyboardInterrupt:
        return _fail("stopped; the MLflow run is marked KILLED", 1)


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
