"""`scaleray sweep`: which batch size and learning rate, by measurement."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from scaleray.config.base import absolute_path
from scaleray.errors import ConfigError


def sweep(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")] = None,
    batch_sizes: str | None = None,
    rules: str | None = None,
    learning_rates: str | None = None,
    optimizers: str | None = None,
    warmups: str | None = None,
    vary: tuple[str, ...] = (),
    seeds: int = 1,
    trials: int | None = None,
    workers_per_trial: int | None = None,
    search: Literal["random", "grid", "optuna"] = "random",
    scheduler: Literal["fifo", "asha", "hyperband", "median", "pbt"] = "fifo",
    metric: str | None = None,
    guided: Annotated[bool, Parameter(negative="")] = False,
    guided_share: float = 0.2,
    against_grid: str | None = None,
    continue_: Annotated[str | None, Parameter(name="--continue")] = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Train a recipe at many batch sizes and learning rates under Ray Tune, and say which are fastest and cheapest.

    Each trial is a training of one worker or of many, with any strategy. The learning rate of the config (or of
    --learning-rates) is the one tuned at optimizer.reference_batch_size; rules carry it to other batch sizes. With a target
    (--stop.at "test/accuracy >= 0.97") trials end when they reach it. Keys of the config can be given as options, as for
    train. Exit code 0 when done, 1 when every trial failed, 2 for bad usage.

    Parameters
    ----------
    batch_sizes
        Global batch sizes: 32..2048 is 32 and every doubling up to 2048; or 32,64,256.
    rules
        How the learning rate follows the batch: linear, sqrt, adam, legw, none, with commas.
    learning_rates
        At the reference batch: 1e-4..1e-2 is any value between (log-uniform), or 1e-3,2e-3.
    optimizers
        sgd, adamw, lars, lamb, with commas.
    warmups
        Lengths of the warm-up with commas, such as "0 epochs,1 epoch".
    vary
        Any other key of the config with its values: --vary optimizer.weight_decay=0,0.01. May be repeated.
    seeds
        How often each combination runs, each time with another seed.
    trials
        How many combinations run. A random search draws them without repeats; a grid runs all.
    workers_per_trial
        Workers of each trial; by default as scale.workers says.
    search
        random, grid, or optuna (needs the extra `search`).
    scheduler
        fifo lets every trial run to its end. asha, hyperband and median stop the worse ones early; pbt (a population) hands the
        weights of the better trials to the worse and mutates their learning rate.
    metric
        What trials are judged by, such as "val/loss min". By default that of stop.at, else the loss of the first split.
    guided
        Of the grid, run only what is worth it: two trainings measure gradient noise and throughput, and further ones run where the
        goodput that follows is highest. Needs a target (--stop.at).
    guided_share
        Samples that a guided sweep may take, as a share of the whole grid's.
    against_grid
        The folder of a sweep of the whole grid, to say how far the guided choice lies from its best.
    continue_
        The folder of an interrupted sweep: run the trials that have no record yet.
    json
        Print the record as JSON on stdout; everything else goes to stderr.
    """
    from rich.console import Console

    from scaleray.config import load_config
    from scaleray.config.base import without_password
    from scaleray.config.loading import read_flags
    from scaleray.scaling.sweep_question import question_of

    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = 160

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if against_grid is not None and not guided and continue_ is None:
        raise ConfigError("--against-grid", against_grid, "only a guided sweep makes a choice to judge", "add --guided")
    resolved, question, tracking_uri = None, None, None
    if continue_ is None:
        resolved = load_config(config, flags=overrides)
        question = question_of(
            resolved, batch_sizes=batch_sizes, rules=rules, learning_rates=learning_rates, optimizers=optimizers,
            warmups=warmups, vary=vary, seeds=seeds, trials=trials, workers_per_trial=workers_per_trial, search=search,
            scheduler=scheduler, metric=metric, guided_share=guided_share if guided else None,
        )  # fmt: skip
    else:
        given = {key: entry.value for key, entry in read_flags(overrides).items()}
        tracking_uri = given.pop("tracking.uri", None)
        if config is not None or given:
            raise ConfigError(
                "--continue", str(continue_), "the sweep goes on as it was asked for, without other options",
                "leave them out; only --tracking.uri may be given again",
            )  # fmt: skip
    # Ray prints what its daemons say to stdout, which is the record's
    quiet = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with quiet:
        from scaleray.launch.sweep import sweep as run
        from scaleray.reports.record_terminal import show_record
        from scaleray.reports.sweep_report import write_sweep_report

        record = run(
            resolved, question, continue_folder=continue_, tracking_uri=tracking_uri,
            say=say,
            command=f"scaleray {shlex.join(map(without_password, sys.argv[1:]))}",
            base_dir=config.resolve().parent if config else None, write_report=write_sweep_report,
            against=_grid(against_grid) if against_grid is not None else None,
        )  # fmt: skip
    show_record(console, record)
    if json:
        print(record.to_json())
    return 0


def _grid(folder: str) -> Any:
    """The record of a finished sweep. Raises ConfigError for a folder that holds none."""
    from scaleray.launch.sweep_folder import finished_record

    found = finished_record(absolute_path(folder), option="--against-grid")
    if found is None:
        raise ConfigError("--against-grid", folder, "there is no sweep's record", "give the folder of a finished sweep")
    return found
