"""`scaleray profile`: analyse the time of a training, a run or a trace."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import print_json, written_in
from scaleray.errors import UsageError
from scaleray.launch.profile.profile_options import ProfileOptions

if TYPE_CHECKING:
    from scaleray.launch.profile.profile import Profiled
    from scaleray.launch.profile.traces import Traced
    from scaleray.profiling.verdict.findings import Verdict


def profile(
    *run: Overrides,
    config: ConfigFile = None,
    options: Annotated[ProfileOptions, AS_OPTIONS] = ProfileOptions(),
    json: Json = False,
) -> int:
    """Report what limits a training, the largest possible gain from removing it, and what to try next.

    `scaleray profile -c FILE` trains some steps and analyses them; config keys can be given as options, as for train.
    `scaleray profile RUN` analyses a recorded run: RUN is its folder or bucket, its name in the default storage path,
    or its id or name in MLflow. `scaleray profile TRACE` summarises torch.profiler traces or memory snapshots from any
    program, in a file or a folder.
    """
    if config is None:
        name = _run_name(run, is_training=options.steps is not None or options.local or options.is_traced)
        from scaleray.launch.profile.traces import is_trace

        if is_trace(name):
            return _show_traces(name, json=json)
        profiled = _of_run(name, options.uri)
    else:
        if run and not run[0].startswith("-"):
            raise UsageError.problem(
                "RUN", "cannot be combined with -c, which profiles a new training", "omit one of them"
            )
        profiled = _of_training(run, config, options, json=json)
    print_verdict(profiled.verdict, is_error=json)
    if profiled.traced is not None:
        print_traced(profiled.traced, is_error=json)
    if json:
        print_json(profiled.to_dict(), written=written_in(profiled.record.run_dir), summary=profiled.summary)
    return 0


def print_verdict(verdict: Verdict, *, is_error: bool) -> None:
    """Print the lines of a verdict, wrapped at the width of the terminal."""
    from rich.console import Console
    from rich.text import Text

    from scaleray.records.terminal.printed_record import print_whole

    console = Console(stderr=is_error, highlight=False)
    for line in verdict.lines():
        print_whole(console, Text(line))


def _show_traces(where: str, *, json: bool) -> int:
    """Print the report on traces."""
    from scaleray.launch.profile.traces import read_traces

    traced = read_traces(where)
    print_traced(traced, is_error=json)
    if json:
        print_json(traced.to_dict())
    return 0


def print_traced(traced: Traced, *, is_error: bool) -> None:
    """Print the tables of traces, the path of the file for Perfetto, and that of the page next to it."""
    from rich.console import Console
    from rich.text import Text

    from scaleray.profiling.report.trace_page import memory_tables, sentence, trace_tables, write_trace_page
    from scaleray.records.terminal.printed_record import print_whole
    from scaleray.records.terminal.terminal_tables import as_rich

    console = Console(stderr=is_error, highlight=False)
    report = traced.report
    for table in [*(trace_tables(report) if report else []), *memory_tables(traced.snapshots)]:
        console.print(as_rich(table, width=console.width))
    for line in [*([sentence(report)] if report else []), *traced.lines()]:
        print_whole(console, Text(line))
    if "://" not in traced.where:
        where = Path(traced.where)
        # there may be other files next to a single trace
        folder = where if where.is_dir() else Path(f"report-{where.name.split('.')[0]}")
        page = write_trace_page(report, traced.snapshots, folder, name=where.resolve().name)
        console.print(f"report: {page}", markup=False, soft_wrap=True)


def _run_name(words: tuple[str, ...], *, is_training: bool) -> str:
    if not words or words[0].startswith("-") or is_training:
        given = f", not {' '.join(words)}" if words else ""
        hint = "such as scaleray profile -c jobs/digits.yaml --local, or scaleray profile RUN_FOLDER"
        raise UsageError.problem("Give", f"a training with -c FILE, or only a RUN{given}", hint)
    if len(words) > 1:
        raise UsageError.problem("Give", f"one RUN, not {len(words)}", "scaleray compare takes several")
    return words[0]


def _of_run(run: str, uri: str | None) -> Profiled:
    from scaleray.launch.profile.profile import profile_run

    return profile_run(run, uri=uri)


def _of_training(overrides: tuple[str, ...], config: Path, options: ProfileOptions, *, json: bool) -> Profiled:
    from rich.console import Console

    from scaleray.common.progress import stage
    from scaleray.launch.cluster.connection import connected
    from scaleray.live.terminal.live_table import Terminal
    from scaleray.planner.ask.auto_layout import load_planned

    resolved = load_planned(config, overrides)
    terminal = Terminal(Console(stderr=json), interval_s=resolved.tracking.interval_s)
    with contextlib.ExitStack() as stack:
        # output of the workload, here or in a worker, must not mix with the record
        stack.enter_context(contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext())
        stack.enter_context(terminal)
        if not options.local:
            stack.enter_context(connected(resolved, meanwhile=["scaleray.launch.run.train"]))
        with stage("importing"):
            from scaleray.launch.profile.profile import profile as run

        return run(
            resolved,
            options=options,
            show=terminal.show,
            say=terminal.say,
            expect_steps=terminal.expect_steps,
            base_dir=config.resolve().parent,
        )
