"""`scaleray study`: measure how a training scales."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import Output, print_json, written_in
from scaleray.common.progress import stage
from scaleray.studies.study_options import StudyOptions


def study(
    *overrides: Overrides,
    config: ConfigFile = None,
    options: Annotated[StudyOptions, AS_OPTIONS] = StudyOptions(),
    json: Json = False,
) -> int:
    """Measure the training on several numbers of workers: curves with intervals, use of time, gain of the next
    doubling.

    All sizes are measured within one group of workers, repeatedly and in random order. Earlier measurements under the
    same conditions are reused, so the same command continues an interrupted study. Config keys can be given as options,
    as for train; study.price_per_worker_hour adds costs.
    """
    from scaleray.config import load_config

    resolved = load_config(config, flags=overrides)
    output = Output(json=json)
    with output.running():
        with stage("importing"):
            from scaleray.records.terminal.printed_record import show_record
            from scaleray.studies.study import study as run
        record = run(
            resolved,
            options=options,
            say=output.say,
            base_dir=config.resolve().parent if config else None,
            command=command_of(config, overrides, options),
        )
    show_record(output.console, record)
    if json:
        print_json(record.to_dict(), written=written_in(record.folder), summary=record.summary)
    return 0


def command_of(config: Path | None, overrides: tuple[str, ...], options: StudyOptions) -> str:
    """Command that repeats a study, without passwords: the measured sizes, and all other options that were given."""
    from scaleray.config.alerts import without_secrets

    words = ["scaleray", "study", *(["-c", str(config)] if config else [])]
    words += ["--world-sizes", ",".join(map(str, options.sizes)), "--mode", ",".join(options.modes)]
    words += ["--repeats", str(options.repeats)]
    for field in dataclasses.fields(options):
        value, option = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == field.default or field.name in ("world_sizes", "mode", "repeats", "force"):
            continue  # reused measurements are not repeated
        each = value if isinstance(value, list | tuple) else (value,)
        for one in each:
            words += [option] if one is True else [option, one if isinstance(one, str) else f"{one:g}"]
    return shlex.join([*words, *without_secrets(overrides)])
