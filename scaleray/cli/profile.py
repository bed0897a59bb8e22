"""`scaleray profile`: where does the time go?"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides
from scaleray.cli.output import print_json, written_in
from scaleray.errors import UsageError

if TYPE_CHECKING:
    from scaleray.launch.profile.profile import Profiled

STEPS = 50


def profile(
    *run: Overrides,
    config: ConfigFile = None,
    steps: int | None = None,
    local: Flag = False,
    uri: str | None = None,
    json: Json = False,
) -> int:
    """Say what limits a training, what removing it would give at most, and what to try next.

    `scaleray profile -c FILE` trains some steps and judges them; keys of the config can be given as options, as for
    train. `scaleray profile RUN` judges what a run has recorded anyway: RUN is its folder or bucket, its name in the
    default storage path, or its id or name in MLflow.

    Parameters
    ----------
    steps
        Steps to train with -c, at least 20; 50 by default.
    local
        With -c: without Ray, in this process, or in gloo processes where there are several workers.
    uri
        MLflow's tracking URI, for a RUN that is found there.
    """
    if config is None:
        profiled = _of_run(_run_name(run, is_training=steps is not None or local), uri)
    else:
        if run and not run[0].startswith("-"):
            raise UsageError("RUN", run[0], "with -c a training is profiled, and no run", "leave out one of them")
        profiled = _of_training(run, config, steps or STEPS, local=local, json=json)
    for line in profiled.verdict.lines():
        print(line, file=sys.stderr if json else sys.stdout)
    if json:
        print_json(profiled.to_dict(), written=written_in(profiled.record.run_dir))
    return 0


def _run_name(words: tuple[str, ...], *, is_training: bool) -> str:
    if not words or words[0].startswith("-") or is_training:
        raise UsageError(
            "what to profile",
            " ".join(words) or "missing",
            "it is a training with -c FILE, or a RUN alone",
            "such as scaleray profile -c jobs/digits.yaml --local, or scaleray profile RUN_FOLDER",
        )
    if len(words) > 1:
        raise UsageError("RUN", " ".join(words), "one run is profiled at a time", "scaleray compare takes several")
    return words[0]


def _of_run(run: str, uri: str | None) -> Profiled:
    from scaleray.launch.profile.profile import profile_run

    return profile_run(run, uri=uri)


def _of_training(overrides: tuple[str, ...], config: Path, steps: int, *, local: bool, json: bool) -> Profiled:
    from rich.console import Console

    from scaleray.config import load_config
    from scaleray.launch.cluster.connection import connected
    from scaleray.progress import stage
    from scaleray.reports.terminal.live import Terminal

    resolved = load_config(config, flags=overrides)
    terminal = Terminal(Console(stderr=json), interval_s=resolved.tracking.interval_s)
    with contextlib.ExitStack() as stack:
        # what the workload prints, here or in a worker, must not mix with the record
        stack.enter_context(contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext())
        stack.enter_context(terminal)
        if not local:
            stack.enter_context(connected(resolved, meanwhile=["scaleray.launch.run.train"]))
        with stage("importing"):
            from scaleray.launch.profile.profile import profile_training

        return profile_training(
            resolved,
            steps=steps,
            local=local,
            show=terminal.show,
            say=terminal.say,
            expect_steps=terminal.expect_steps,
            base_dir=config.resolve().parent,
        )
