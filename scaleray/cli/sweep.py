"""`scaleray sweep`: find batch size and learning rate by measurement."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import Output, print_json, written_in
from scaleray.common.progress import stage
from scaleray.errors import ConfigError
from scaleray.sweeps.sweep_options import SweepOptions


def sweep(
    *overrides: Overrides,
    config: ConfigFile = None,
    options: Annotated[SweepOptions, AS_OPTIONS] = SweepOptions(),
    json: Json = False,
) -> int:
    """Train a recipe at many batch sizes and learning rates under Ray Tune, and report the fastest and cheapest.

    Each trial is a training on one or more workers, with any strategy. The learning rate of the config (or of
    --learning-rates) is the one tuned at optimizer.reference_batch_size; rules scale it to other batch sizes. With a
    target (--stop.at "test/accuracy >= 0.97"), trials end when they reach it. Config keys can be given as options, as
    for train. Exit code 0 when done, 1 if every trial failed, 2 for bad usage.
    """
    from scaleray.config import load_config
    from scaleray.config.alerts import without_secrets
    from scaleray.sweeps.sweep_question import question_of

    resolved, tracking_uri = None, None
    if options.continue_ is None:
        resolved = load_config(config, flags=overrides)
        question_of(resolved, options=options)  # report a mistake before importing anything heavy
    else:
        tracking_uri = _given_again(options.continue_, config, overrides)
    output = Output(json=json, width=160)
    with output.running():
        with stage("importing"):
            from scaleray.records.terminal.printed_record import show_record
            from scaleray.sweeps.sweep import sweep as run

        record = run(
            resolved,
            options=options,
            tracking_uri=tracking_uri,
            say=output.say,
            base_dir=config.resolve().parent if config else None,
            command=f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}",
        )
    show_record(output.console, record)
    if json:
        print_json(record.to_dict(), written=written_in(record.folder), summary=record.summary)
    return 0


def _given_again(folder: str, config: Path | None, overrides: tuple[str, ...]) -> str | None:
    """MLflow's address, the only option that a continued sweep accepts. Raises ConfigError for any other."""
    from scaleray.config.loading import read_flags

    given = {key: entry.value for key, entry in read_flags(overrides).items()}
    tracking_uri = given.pop("tracking.uri", None)
    if config is not None or given:
        raise ConfigError.problem(
            "--continue", "uses the options of the interrupted sweep", "omit all options except --tracking.uri"
        )
    return tracking_uri
