"""`scaleray`: entry point of all commands. Exit codes: 0 done, 1 failed, 2 bad usage, 3 inconclusive, 130 stopped."""

from __future__ import annotations

import inspect
import os
import select
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from scaleray import __version__
from scaleray.cli.check import check
from scaleray.cli.checkpoint import checkpoint_app
from scaleray.cli.cluster import cluster_app
from scaleray.cli.compare import compare
from scaleray.cli.config import config_app
from scaleray.cli.dashboards import dashboards_app
from scaleray.cli.doctor import doctor
from scaleray.cli.evaluate import evaluate
from scaleray.cli.export import export
from scaleray.cli.gate import gate
from scaleray.cli.help import (
    CLUSTERS,
    LOOK,
    OTHER,
    PRODUCTION,
    PROVE,
    START,
    TRAIN_KEYS,
    USE,
    Pages,
    add_in_order,
    missing,
    shown_default,
)
from scaleray.cli.init import init
from scaleray.cli.jobs import jobs_app
from scaleray.cli.output import STOPPED
from scaleray.cli.path import path_app
from scaleray.cli.plan import plan_app
from scaleray.cli.predict import predict
from scaleray.cli.profile import profile
from scaleray.cli.promote import promote, rollback
from scaleray.cli.report import report
from scaleray.cli.study import study
from scaleray.cli.submit import submit
from scaleray.cli.sweep import sweep
from scaleray.cli.tracking import tracking_app
from scaleray.cli.train import train
from scaleray.cli.verify import verify
from scaleray.cli.watch import watch
from scaleray.common.installed import missing_library
from scaleray.common.printed import inert
from scaleray.errors import MARKED_KILLED, ConfigError, ScaleRayError, UsageError

Shell = Literal["bash", "zsh", "fish"]

app = App(
    name="scaleray",
    version=__version__,
    help="Train a PyTorch recipe on one worker or on many, with the same weights, shown step by step.",
    help_format="plaintext",
    help_formatter=Pages(),
    default_parameter=Parameter(show_default=shown_default),
    suppress_keyboard_interrupt=False,  # a stopped run reports it, and exits with 1
)
app.command(train, group=START, sort_key=-1, help_epilogue=TRAIN_KEYS)
add_in_order(app, START, init, check, config_app)
add_in_order(app, PROVE, verify, study, profile, sweep, plan_app)
add_in_order(app, LOOK, watch, report, compare, tracking_app, dashboards_app)
add_in_order(app, USE, evaluate, predict, export, checkpoint_app)
add_in_order(app, CLUSTERS, submit, jobs_app, doctor, cluster_app)
add_in_order(app, PRODUCTION, gate, promote, rollback, path_app)
for flag in ("--help", "--version"):
    app[flag].group = OTHER


@app.command(name="--install-completion", group=OTHER)
def install_completion(*, shell: Shell | None = None, output: Path | None = None) -> int:
    """Install shell completion of commands, options and config keys. Repeat it after an update, which may add some.

    Parameters
    ----------
    shell
        The shell; by default the current one.
    output
        File to write the script to, without adding a line to the shell's start-up file.
    """
    from scaleray.cli.completion import install

    path = install(app, shell, output)
    print(f"script: {path}" if output is not None else f"completion: {path}; new shells use it")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    _make_early_ends_failures()
    try:
        code = run_command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        # the reader closed the pipe, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
        code = 1
    sys.exit(code)


def _has_lost_its_reader(output: int) -> bool:
    """Whether the reader of this end of a pipe is gone."""
    watch = select.poll()
    watch.register(output, 0)
    return any(state & select.POLLERR for _, state in watch.poll(0))


def _make_early_ends_failures() -> None:
    """Turn os._exit(0) in user code of this process into a failure, so that it does not look like success."""
    real, own = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == own and status == 0:  # forked children end in this way
            os.write(2, b"RunFailedError: os._exit(0) ended the command before it was done\n")
            status = 1
        real(status)

    os._exit = end


def run_command(arguments: list[str]) -> int:
    """Return the exit code of a command line; deliberate errors are printed as one message without a traceback."""
    if nul := next((word for word in arguments if "\0" in word), None):
        return _fail(f"UsageError: an argument is {nul!r:.200}: it must not contain a NUL character", 2)
    try:
        result: Any = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except CycloptsError as exc:
        return _fail(_usage(exc), 2)
    except ScaleRayError as exc:
        if _lacks_config(exc, arguments):
            exc = UsageError.problem("Give", "a config with -c FILE", "scaleray init writes one that is ready to train")
        return _fail(f"{type(exc).__name__}: {exc}", exc.exit_code)
    except ModuleNotFoundError as exc:
        missing = missing_library(exc)
        if missing is None:
            raise
        return _fail(f"{type(missing).__name__}: {missing}", missing.exit_code)
    except SystemExit as exc:  # raised by user code in an unforeseen place: scaleray itself never calls sys.exit
        if isinstance(exc.__context__, BrokenPipeError):  # but rich does if the reader has closed the pipe
            return 1
        return _fail(f"RunFailedError: sys.exit({exc.code!r}) ended the command early", 1)
    except KeyboardInterrupt as exc:
        return _fail(f"stopped; {MARKED_KILLED}" if MARKED_KILLED in exc.args else "stopped", STOPPED)


def _lacks_config(exc: ScaleRayError, arguments: list[str]) -> bool:
    """Whether a command that needs a config got neither a file nor config keys."""
    is_lacking = isinstance(exc, ConfigError) and exc.found is None and exc.key == "workload.name"
    return is_lacking and not any(word.partition("=")[0] in ("-c", "--config") for word in arguments)


def _usage(exc: CycloptsError) -> str:
    """The usage error in terms of the command line, with the help command."""
    command = " ".join(["scaleray", *(exc.command_chain or ())])
    if isinstance(exc, MissingArgumentError) and exc.argument is not None:
        return f"UsageError: {missing(exc)}.\n  see {command} --help"
    if isinstance(exc, UnusedCliTokensError) and exc.unused_tokens:
        words = " ".join(exc.unused_tokens)
        name = inspect.signature(exc.target).parameters.get("name") if exc.target else None
        named = name is not None and name.kind is name.KEYWORD_ONLY
        hint = f"give it as --name {words}" if named else "leave it out"
        return f"UsageError: {command} does not take {words!r:.200}.\n  {hint}; see {command} --help"
    return f"{type(exc).__name__.removesuffix('Error')}: {exc}\n  see {command} --help"


def _fail(message: str, code: int) -> int:
    print(inert(message), file=sys.stderr)
    return code
