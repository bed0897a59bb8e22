"""`profile`: measure where the time of a training goes, from a short run of it or the records of a finished run."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.common.options import takes
from scaleray.common.printed import Printed
from scaleray.config import RunConfig
from scaleray.config.base import Duration
from scaleray.errors import ConfigError, UsageError
from scaleray.launch.profile.profile_options import STEPS, ProfileOptions
from scaleray.launch.profile.traces import Traced, traced_of
from scaleray.launch.run.resume import FILE as ABOUT
from scaleray.launch.run.train import run_training
from scaleray.launch.run.train_options import TrainOptions
from scaleray.launch.session.config_argument import Config, resolved
from scaleray.profiling.verdict.findings import Limit, Verdict
from scaleray.profiling.verdict.of_run import FIRST_STEPS, verdict_of_run
from scaleray.recording.find_record import find_run, locations_of
from scaleray.records.json_record import jsonable
from scaleray.records.read import FILE as RECORD
from scaleray.records.run_record import RunRecord, Say, Show

LEAST_STEPS = 2 * FIRST_STEPS
"""Minimum steps of a short training, whose first steps do not count."""


@dataclass(frozen=True)
class Profiled(Printed):
    """A run with the verdict on how it spent its time."""

    record: RunRecord
    verdict: Verdict
    traced: Traced | None = None
    """Content of the run's traces, if it has any."""

    def lines(self) -> list[str]:
        """The verdict as lines, and the run's folder."""
        return [self.verdict.sentence, *self.verdict.lines()[1:], f"folder: {self.record.run_dir}"]

    def to_dict(self) -> dict[str, Any]:
        """Name of the run, verdict and profile as JSON values."""
        profile = None if self.record.profile is None else dataclasses.asdict(self.record.profile)
        verdict = {"limit": self.verdict.limit, **dataclasses.asdict(self.verdict)}
        found: dict[str, Any] = jsonable({"name": self.record.name, "verdict": verdict, "profile": profile})
        return found


@takes(ProfileOptions)
def profile(
    what: Config,
    workload: Any = None,
    *,
    options: ProfileOptions,
    show: Show = lambda messages: None,
    say: Say = lambda text: None,
    expect_steps: Callable[[int], None] = lambda steps: None,
    base_dir: Path | None = None,
) -> Profiled:
    """Measure where the time of a training goes, its bottleneck and the next thing to try: `.verdict` of the result.

    what: a config (a RunConfig, a mapping or a YAML file), with which some steps are trained, as with -c on the command
    line; or a recorded run: its folder, its name in the storage path, or its id or name in MLflow at `uri`. workload: a
    class or an object; None loads the config's. show: receives the run's messages as they arrive; say: receives lines
    on the progress; expect_steps: receives the training's length once it is known. base_dir: folder to which a
    RunConfig's paths are relative. Traces are in `.traced` of the result.

    The training is a run like any other, in a separate experiment of MLflow, and saves no final weights. Traced steps
    come after the others, and do not count in the verdict. Raises UsageError for errors of use."""
    if isinstance(what, str | Path) and Path(what).suffix not in (".yaml", ".yml"):
        return profile_run(str(what), uri=options.uri)
    config, base_dir, workload = resolved(what, workload, base_dir)
    steps, trace = STEPS if options.steps is None else options.steps, options.request
    if steps < LEAST_STEPS:
        raise ConfigError(
            "--steps",
            steps,
            f"it must be at least {LEAST_STEPS}, as the first {FIRST_STEPS} do not count",
            "50 is usual",
        )
    if trace is not None:
        trace.check_ranks(config.scale.max_workers)
    record = run_training(
        short(config, steps + (trace.num_steps if trace is not None else 0)),
        workload,
        options=TrainOptions(local=options.local),
        show=show,
        say=say,
        expect_steps=expect_steps,
        base_dir=base_dir,
        in_processes=True,
        trace=trace,
        probes_links=True,
    )
    return _profiled(record)


def profile_run(run: str, *, uri: str | None = None) -> Profiled:
    """Measure where the time of a recorded run went. run: its folder, its name, or its id or name in MLflow at `uri`.
    Raises UsageError if it has no profile, or too short a one."""
    _check_has_ended(run)
    found = find_run(run, uri=uri)
    if not isinstance(found.record, RunRecord):
        raise UsageError(
            "RUN", run, "it is a study or sweep, not a training", "scaleray report shows where its time went"
        )
    return _profiled(found.record)


def short(config: RunConfig, steps: int) -> RunConfig:
    """The config for training only the first steps, without early stopping."""
    # the learning rate has no part in the time, but a rate that comes at once might end in NaN
    warmup = Duration(steps - 1, "steps") if config.schedule.warmup.value else config.schedule.warmup
    name = config.tracking.experiment
    return config.changed(
        {
            "stop.after": Duration(steps, "steps"),
            "stop.at": None,
            "stop.patience": None,
            "schedule.warmup": warmup,
            "schedule.length": None,
            "tracking.experiment": f"{name[:190]} profiles",
            "checkpoint.save_final": False,
        }
    )


def _profiled(record: RunRecord) -> Profiled:
    config = shlex.quote(f"{record.run_dir}/config.yaml") if record.run_dir else "FILE"
    again = f"scaleray profile -c {config}"
    if record.profile is None:
        raise UsageError(
            f"the profile of {record.name}",
            "missing",
            "runs of a single step and of older versions have none",
            f"train some steps to measure one: {again}",
        )
    traced = traced_of(record.run_dir) if record.run_dir else None
    verdict = verdict_of_run(record)
    if verdict.limit is Limit.INCOMPLETE and verdict.steps < LEAST_STEPS // 2:
        raise UsageError.problem(
            f"the profile of {record.name}",
            f"covers only {verdict.steps} steps: too few to show where the time goes",
            f"train more steps: {again} --steps 50",
        )
    return Profiled(record, verdict, traced)


def _check_has_ended(run: str) -> None:
    """Refuse a run that has not ended, since its record is written at its end."""
    for location in locations_of(run):
        with contextlib.suppress(OSError, ValueError):
            if location.size(ABOUT) is not None and location.size(RECORD) is None:
                raise UsageError(
                    "RUN",
                    run,
                    f"it has no {RECORD}, which is written when a run ends; it is still running, or was killed",
                    "wait for its end, or profile a short training: scaleray profile "
                    f"-c {shlex.quote(f'{location.root}/config.yaml')}",
                )
