"""A study under way: what is not known yet is measured, each result is kept as it comes, and the record is made of
all."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scaleray.config import RunConfig
from scaleray.config.base import without_password
from scaleray.errors import ScaleRayError, UsageError, first_line
from scaleray.launch.session.folder import RunFolder
from scaleray.launch.study import noise as study_noise
from scaleray.launch.study.conclusions import Conclusions, Measurements
from scaleray.launch.study.hardware import check_one_kind
from scaleray.launch.study.plan import MODES, OnCurve, Plan, Question
from scaleray.launch.study.turn_store import KnownTurns
from scaleray.launch.study.workers import Climb
from scaleray.records.run import Say
from scaleray.records.study import Conditions, NoiseCourse, StudyRecord
from scaleray.tracking.study_runs import ParentRun
from scaleray.training.model_profile import profile_workload
from scaleray.training.setup.job import TRAIN
from scaleray.training.study.ladder import Ascent, Measured, Rung

WriteReport = Callable[[StudyRecord, Path], Sequence[Path]]
"""Function that writes what people look at beside the record, and gives its files."""


@dataclass(kw_only=True)
class RunningStudy:
    """A study between its plan and its record.

    cores: see `Conclusions`. more: records of studies whose points stand on the same curves.
    """

    config: RunConfig
    question: Question
    plan: Plan
    conditions: Conditions
    folder: RunFolder
    mlflow: ParentRun
    say: Say
    command: str
    started_at: float
    cores: int | None
    workers_per_node: int
    more: Sequence[StudyRecord]
    write_report: WriteReport | None

    def __post_init__(self) -> None:
        self.known = KnownTurns(self.config.checkpoint.storage_path, self.conditions)
        self.measured = Measurements({name: [] for name in self.plan.rungs})
        self.conclusions = Conclusions(
            self.folder.name, self.config, self.question, self.plan, self.measured, self.cores, self.workers_per_node
        )
        self.said: set[str] = set()
        self.logged: set[OnCurve] = set()
        if self.config.study.peak_tflops or self.config.scale.gpus_per_worker:
            self._count_operations()
            if isinstance(self.measured.profile, str):
                self.say(f"  without MFU, as the model's operations could not be counted: {self.measured.profile}")

    def run(self, climb: Climb) -> StudyRecord:
        """Measure what is missing, and conclude."""
        status = "FAILED"
        try:
            self._announce()
            if not self.question.force:
                self._take_over()
            for ascent in self._ascents():
                climb(ascent, self._on_measured)
                check_one_kind(self.measured.turns)
            is_counted = not isinstance(self.measured.profile, str)
            if len(self.question.sizes) > 1 and not is_counted and not self.measured.is_emulated:
                self._count_operations()
            record = self.record()
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if status != "FINISHED":
                self._leave(status)
        return self._keep(record, status)

    def _count_operations(self) -> None:
        """Count the operations of a sample, for MFU and for the planner."""
        job, rows = next(iter(self.plan.rungs.values())).job, self.plan.sources[TRAIN]
        try:
            few = rows.read(np.arange(2))
            self.measured.profile = profile_workload(
                job.workload, few, self.config.precision, gives_tuples=job.splits[TRAIN].gives_tuples
            )
        except Exception as exc:  # whatever the counter cannot count, the study goes on without MFU
            text = first_line(exc)
            self.measured.profile = text if isinstance(exc, UsageError) else f"{type(exc).__name__}: {text}"

    def _announce(self) -> None:
        q, first = self.question, next(iter(self.plan.rungs.values()))
        *smaller, last = q.sizes
        sizes = f"{', '.join(map(str, smaller))} and {last} workers" if smaller else _workers(last)
        modes = " and ".join(mode for mode in MODES if mode in q.modes)
        self.say(f"study {self.folder.name}: {self.config.workload.name} on {sizes}, {modes} scaling")
        self.say(
            f"  {q.repeats} turn{'s' if q.repeats > 1 else ''} of each of "
            f"{len(self.plan.rungs)} rung{'s' if len(self.plan.rungs) > 1 else ''} "
            f"in random order, each at least {q.effort.steps} steps and {q.effort.seconds:g} s; "
            f"{first.job.recipe.global_batch_size} samples a step at the base"
        )
        if self.plan.left_out:
            self.say(f"  {self.plan.left_out}")

        if why := study_noise.why_no_noise(self.plan.rungs):
            self.say(f"  noise scale: not measured ({why})")

    def _take_over(self) -> None:
        for name in self.plan.rungs:
            turns = self.known.turns(name)[-self.question.repeats :]
            self.measured.turns[name] = turns
            if turns:
                names = ", ".join(dict.fromkeys(turn.study for turn in turns))
                self.say(f"  {name}: {len(turns)} turns reused from {names} (--force measures anew)")
            if self.question.to_target and (result := self.known.to_target(name)) is not None:
                self.measured.targets[name] = result
                self.say(f"  {name}: training to the target reused")
            if self.plan.rungs[name].measures_noise:
                noise = self.known.noise(name, self.config.noise_scale, is_to_target=self.question.to_target)
                if noise is not None:
                    self.measured.noises[name] = noise
                    self.say(f"  {name}: noise scale reused")

    def _ascents(self) -> list[Ascent]:
        """What is still to be measured: in one group of workers, or each rung in its own."""
        rungs: list[Rung] = []
        for name, rung in self.plan.rungs.items():
            missing = self.question.repeats - len(self.measured.turns[name])
            needs_noise = rung.measures_noise and name not in self.measured.noises
            # the noise of a training to the target is measured in one
            needs_target = rung.trains_to_target and (name not in self.measured.targets or needs_noise)
            if missing or needs_target or needs_noise:
                left = dataclasses.replace(rung, trains_to_target=needs_target, measures_noise=needs_noise)
                rungs.append(dataclasses.replace(left, num_turns=missing))
        if not rungs:
            self.say("  everything was measured before; no worker is started")
            return []
        self.total = sum(rung.num_turns for rung in rungs)
        self.done = 0
        groups = [rungs]
        if self.question.relaunch:
            random.Random(self.question.seed).shuffle(rungs)
            groups = [[rung] for rung in rungs]
        return [Ascent(rungs=tuple(group), effort=self.question.effort, seed=self.question.seed) for group in groups]

    def _on_measured(self, measured: Measured) -> None:
        """Keep what a worker has told, at once."""
        rung = self.plan.rungs[measured.rung]
        if measured.said and measured.said not in self.said:
            self.said.add(measured.said)
            self.say(f"  note ({_workers(rung.workers)}): {measured.said}")
        if measured.to_target is not None:
            self.measured.targets[rung.name] = measured.to_target
            self.known.keep_target(rung.name, measured.to_target, at=time.time())
            result = measured.to_target
            how = "reached" if result.is_reached else "missed"
            self.say(
                f"  {_workers(rung.workers)}: target {how} after {result.samples} samples and {result.time_s:.3g} s"
            )
        if measured.noise is not None:
            self._keep_noise(rung, measured.noise)
        if measured.turn is not None:
            turn = dataclasses.replace(measured.turn, study=self.folder.name)
            if self.question.relaunch:  # what is measured by workers of its own shares nothing with others
                turn = dataclasses.replace(turn, round=None)
            self.measured.turns[rung.name].append(turn)
            self.known.keep(rung.name, turn)
            self.measured.placements[rung.name] = measured.placement
            self.done += 1
            ms = 1e3 * statistics.median(turn.step_times_s)
            self.say(
                f"  [{self.done}/{self.total}] {_workers(rung.workers)}, batch {rung.job.recipe.global_batch_size}: "
                f"{ms:.4g} ms a step, {len(turn.step_times_s)} steps"
            )
        self._log_complete()

    def _keep_noise(self, rung: Rung, noise: NoiseCourse) -> None:
        self.measured.noises[rung.name] = noise
        self.known.keep_noise(
            rung.name, noise, self.config.noise_scale, is_to_target=rung.trains_to_target, at=time.time()
        )
        self.say(f"  {_workers(rung.workers)}: gradient noise scale {study_noise.in_words(noise)}")

    def _log_complete(self) -> None:
        """Write to MLflow the points of which everything is known."""
        for place in self.plan.places:
            if place not in self.logged and self.conclusions.is_complete(place):
                self.logged.add(place)
                self.mlflow.log_point(self.conclusions.point(place))

    def record(self) -> StudyRecord:
        """The study as far as it is measured."""
        topology = {
            **self.conditions.topology,
            "placement of workers": self.measured.placements,
            "workers": self.measured.hardware,
        }
        return StudyRecord(
            name=self.folder.name,
            command=self.command,
            config=self.config.to_dict(),
            conditions=dataclasses.replace(self.conditions, topology=topology),
            price_per_worker_hour=self.config.study.price_per_worker_hour,
            currency=self.config.study.currency,
            started_at=self.started_at,
            duration_s=time.time() - self.started_at,
            tracking_uri=self.mlflow.tracking_uri,
            folder=without_password(self.folder.path),
            **self.conclusions.values(self.more),
        )

    def _leave(self, status: str) -> None:
        """Keep what was measured until the end came, and say how to go on; what ended the study matters more."""
        count = self.measured.num_turns
        record = None
        with contextlib.suppress(ScaleRayError):
            record = self.record() if count else None
        if record is not None:
            self._keep(record, status)
        else:
            self.mlflow.finish(None, status=status)
        if count:
            same = "the same command without --force" if self.question.force else "the same command"
            self.say(f"  {count} turns are kept: {same} goes on from there")

    def _keep(self, record: StudyRecord, status: str) -> StudyRecord:
        """Write the record and the report, here and in MLflow."""
        record = self.mlflow.identify(record)
        folder = Path(self.folder.work_dir)
        (folder / "record.json").write_text(record.to_json())
        files = [folder / "record.json"]
        if self.write_report is not None:
            files += self.write_report(record, folder)
        lacking = self.mlflow.finish(record, status=status, files=files)
        if lacking:
            self.say(f"  warning: {lacking}; everything is in {record.folder}")
        return record


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"
