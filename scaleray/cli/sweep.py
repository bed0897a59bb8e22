"""`scaleray sweep`: which batch size and learning rate, by measurement."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides, Several
from scaleray.cli.output import Output, print_json, written_in
from scaleray.errors import ConfigError
from scaleray.progress import stage

if TYPE_CHECKING:
    from scaleray.config import RunConfig
    from scaleray.scaling.sweeps.question import SweepQuestion


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """Trials, and how they are searched."""

    batch_sizes: str | None = None
    """Global batch sizes: 32..2048 is 32 and every doubling up to 2048; or 32,64,256."""
    rules: str | None = None
    """How the learning rate follows the batch: linear, sqrt, adam, legw, none, with commas."""
    learning_rates: str | None = None
    """At the reference batch: 1e-4..1e-2 is any value between (log-uniform), or 1e-3,2e-3."""
    optimizers: str | None = None
    """sgd, adamw, lars, lamb, with commas."""
    warmups: str | None = None
    """Lengths of the warm-up with commas, such as "0 epochs,1 epoch"."""
    vary: Several = ()
    """Any other key of the config with its values: --vary optimizer.weight_decay=0,0.01. May be repeated."""
    seeds: int = 1
    """How often each combination runs, each time with another seed."""
    trials: int | None = None
    """How many combinations run. A random search draws them without repeats; a grid runs all."""
    workers_per_trial: int | None = None
    """Workers of each trial; by default as scale.workers says."""
    search: Literal["random", "grid", "optuna"] = "random"
    """random, grid, or optuna (needs the extra `search`)."""
    scheduler: Literal["fifo", "asha", "hyperband", "median", "pbt"] = "fifo"
    """fifo runs every trial to its end; asha, hyperband, median stop worse ones early; pbt hands on better weights."""
    metric: str | None = None
    """Metric that trials are judged by, such as "val/loss min". By default that of stop.at, else the first split's
    loss.
    """


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GuidedOptions:
    """Whether only what is worth it runs."""

    guided: Flag = False
    """Run only what is worth it of the grid, by measured gradient noise and throughput. Needs a target (--stop.at)."""
    guided_share: float = 0.2
    """Samples that a guided sweep may take, as a share of the whole grid's."""
    against_grid: str | None = None
    """The folder of a sweep of the whole grid, to say how far the guided choice lies from its best."""


def sweep(
    *overrides: Overrides,
    config: ConfigFile = None,
    space: SpaceOptions = SpaceOptions(),
    guidance: GuidedOptions = GuidedOptions(),
    continue_: Annotated[str | None, Parameter(name="--continue")] = None,
    json: Json = False,
) -> int:
    """Train a recipe at many batch sizes and learning rates under Ray Tune, and say which are fastest and cheapest.

    Each trial is a training of one worker or of many, with any strategy. The learning rate of the config (or of
    --learning-rates) is the one tuned at optimizer.reference_batch_size; rules carry it to other batch sizes. With a
    target (--stop.at "test/accuracy >= 0.97") trials end when they reach it. Keys of the config can be given as
    options, as for train. Exit code 0 when done, 1 when every trial failed, 2 for bad usage.

    Parameters
    ----------
    continue_
        The folder of an interrupted sweep: run the trials that have no record yet.
    """
    from scaleray.config.alerts import without_secrets

    grid, is_guided = guidance.against_grid, guidance.guided
    if grid is not None and not is_guided and continue_ is None:
        raise ConfigError("--against-grid", grid, "only a guided sweep makes a choice to judge", "add --guided")
    resolved, question, tracking_uri = None, None, None
    if continue_ is None:
        resolved, question = _asked(config, overrides, space, guidance)
    else:
        tracking_uri = _given_again(continue_, config, overrides)
    output = Output(json=json, width=160)
    with output.running():
        with stage("importing"):
            from scaleray.launch.sweep.folder import grid_record
            from scaleray.launch.sweep.sweep import sweep as run
            from scaleray.reports.records.sweep import write_sweep_report
            from scaleray.reports.terminal.record import show_record

        record = run(
            resolved,
            question,
            continue_folder=continue_,
            tracking_uri=tracking_uri,
            say=output.say,
            command=f"scaleray {shlex.join(without_secrets(sys.argv[1:]))}",
            base_dir=config.resolve().parent if config else None,
            write_report=write_sweep_report,
            against=grid_record(grid) if grid is not None else None,
        )
    show_record(output.console, record)
    if json:
        print_json(record.to_dict(), written=written_in(record.folder), summary=record.summary)
    return 0


def _asked(
    config: Path | None, overrides: tuple[str, ...], space: SpaceOptions, guidance: GuidedOptions
) -> tuple[RunConfig, SweepQuestion]:
    from scaleray.config import load_config
    from scaleray.scaling.sweeps.question import question_of

    resolved = load_config(config, flags=overrides)
    share = guidance.guided_share if guidance.guided else None
    return resolved, question_of(resolved, **vars(space), guided_share=share)


def _given_again(folder: str, config: Path | None, overrides: tuple[str, ...]) -> str | None:
    """Address of MLflow, the one option that a continued sweep takes. Raises ConfigError for any other."""
    from scaleray.config.loading import read_flags

    given = {key: entry.value for key, entry in read_flags(overrides).items()}
    tracking_uri = given.pop("tracking.uri", None)
    if config is not None or given:
        raise ConfigError(
            "--continue",
            folder,
            "a sweep continues with its own options",
            "leave them out; only --tracking.uri may be given again",
        )
    return tracking_uri
