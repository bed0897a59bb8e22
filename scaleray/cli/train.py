"""`scaleray train`: train a workload."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import print_json, written_in
from scaleray.common.progress import stage
from scaleray.errors import first_line
from scaleray.launch.run.train_options import TrainOptions

if TYPE_CHECKING:
    from scaleray.records.run_record import RunRecord


def train(
    *overrides: Overrides,
    config: ConfigFile = None,
    options: Annotated[TrainOptions, AS_OPTIONS] = TrainOptions(),
    report: bool = True,
    json: Json = False,
) -> int:
    """Train a workload on Ray: on a local cluster, or on the one in RAY_ADDRESS.

    Every config key can be given as an option, for example --scale.workers 2 --batch.global-size 64; `scaleray config
    keys` lists them. Options take precedence over SCALERAY_ environment variables, and these over the file.

    Parameters
    ----------
    report
        Write report.html next to the record, and save the page of all trainings in MLflow.
    """
    import psutil
    from rich.console import Console

    from scaleray.launch.cluster.connection import connected
    from scaleray.live.terminal.live_table import Terminal, final_lines
    from scaleray.planner.ask.auto_layout import load_planned
    from scaleray.recording.store import resolve_uri

    if config is None and options.resume is not None and options.resume != "auto":
        from scaleray.launch.run.resume import config_of

        resolved = config_of(options.resume, overrides)
    else:
        resolved = load_planned(config, overrides)
    terminal = Terminal(Console(stderr=json), interval_s=resolved.tracking.interval_s)
    with contextlib.ExitStack() as stack:
        # output of the workload, here or in a worker, must not mix with the record
        stack.enter_context(contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext())
        stack.enter_context(terminal)
        if not options.local and options.resume is None:  # a finished run leaves nothing to do
            stack.enter_context(connected(resolved, meanwhile=["scaleray.launch.run.train"]))
        with stage("importing"):
            from scaleray.launch.run.train import run_training

        record = run_training(
            resolved,
            None,
            options=options,
            show=terminal.show,
            say=terminal.say,
            expect_steps=terminal.expect_steps,
            base_dir=config.resolve().parent if config else None,
            # the user's waiting time counts from the start of the process
            started_at=psutil.Process().create_time(),
        )
    for line in final_lines(record):
        terminal.say(line)
    if report and record.run_id:
        for line in _kept(record, resolve_uri(resolved.tracking.uri)):
            terminal.say(line)
    if json:
        print_json(record.to_dict(), written=written_in(record.run_dir), summary=record.summary)
    return 0


def _kept(record: RunRecord, tracking_uri: str) -> list[str]:
    """Lines on the report and on the page of all trainings. Never raises, since the run itself is complete."""
    from scaleray.launch.run.kept_page import keep_for_readers
    from scaleray.recording import saved_views

    try:
        path = keep_for_readers(record, tracking_uri=tracking_uri)
    except Exception as exc:  # mlflow and its drivers, matplotlib and the disk share no base class
        return [f"warning: no report was written ({type(exc).__name__}: {first_line(exc)}); scaleray report writes one"]
    where = saved_views.trainings_link(tracking_uri, record.experiment_id)
    return [*([f"report:  {path}"] if path else []), f"all runs: {where}"]
