"""A running study, which reuses known results, stores each new one immediately, and builds the record."""

import contextlib
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaleray.common.printed import quantity
from scaleray.config.base import without_password
from scaleray.data import TRAIN
from scaleray.data.source_interface import Source
from scaleray.errors import MARKED_KILLED, UsageError, first_line
from scaleray.launch.session.campaign import Campaign
from scaleray.live.state.measured_series import Measured
from scaleray.recording import store
from scaleray.recording.measured_metrics import MeasuredMetrics
from scaleray.recording.study_runs import key_of
from scaleray.records.published import RankSample
from scaleray.records.run_record import EMULATED
from scaleray.records.start import steady_time
from scaleray.records.study_record import Conditions, Curve, Mode, NoiseHistory, Point, Repeat, StudyRecord, ToTarget
from scaleray.records.workload_profile import WorkloadProfile
from scaleray.studies import noise as study_noise
from scaleray.studies.conclusions import planner_laws, points_of_others, words_of
from scaleray.studies.curves.curves import as_curve
from scaleray.studies.hardware import OVERSUBSCRIBED
from scaleray.studies.measure_sizes import Result, StudySize
from scaleray.studies.point import point_of, point_so_far
from scaleray.studies.repeat_store import TARGET, TURN, StoredRepeats, noise_kind
from scaleray.studies.study_options import MODES, StudyOptions
from scaleray.training.flop_counter import profile_workload


@dataclass(kw_only=True)
class RunningStudy(Campaign):
    """A study between its plan and its record.

    study_sizes: by name. left_out: sentence on sizes that are not measured. more: records of other studies with points
    on the same curves."""

    kind = "study"
    options: StudyOptions
    study_sizes: Mapping[str, StudySize]
    sources: Mapping[str, Source]
    conditions: Conditions
    command: str
    workers_per_node: int
    left_out: str
    more: Sequence[StudyRecord]
    profile: WorkloadProfile | str = "they had not been counted when the study ended"
    """Counts of the model's operations, or the reason why they are unknown."""
    num_taken: int = 0
    total: int = 0
    """Number of measurements to take."""
    said: set[str] = field(default_factory=set)
    points: dict[tuple[Mode, str], Point] = field(default_factory=dict)
    """Complete points, by curve and size."""
    metrics: MeasuredMetrics | None = None
    """Metrics that it publishes while it measures."""
    has_left: bool = False

    def open(self) -> None:
        """Create its run in MLflow, and count operations for MFU. Call it inside `kept_to_its_end`."""
        self.known = StoredRepeats(self.config.checkpoint.storage_path, self.conditions)
        self.open_run(
            self.sources,
            self.conditions.environment,
            config_hash=self.conditions.config_hash,
            nodes=self.conditions.topology["nodes"],
            workers=max(self.options.sizes),
            settings={"study": self.config.study.model_dump()},
        )
        if self.config.study.peak_tflops or self.config.scale.gpus:
            self._count_operations()
            if isinstance(self.profile, str):
                self.say(f"  without MFU, because the model's operations could not be counted: {self.profile}")

    @contextlib.contextmanager
    def kept_to_its_end(self) -> Iterator[None]:
        """Context of the measurements and the MLflow run. An early exit still stores known results. An outer context
        only closes parts that an inner one left open."""
        try:
            yield
        except KeyboardInterrupt as exc:
            self._leave("KILLED")
            if self.has_run:
                exc.args = (MARKED_KILLED,)
            raise
        except BaseException:
            self._leave("FAILED")
            raise

    def measured(self) -> Measured:
        """Points and unfinished points so far."""
        # the turns of all sizes take turns, so that whole points come with the last ones alone
        points = [
            self.points.get((mode, size.name)) or point_so_far(mode, size)
            for mode, size in self._sizes_by_mode()
            if size.turns
        ]
        return Measured("study", self.under_way.done, self.under_way.total, points=points)

    def begin(self) -> list[list[StudySize]]:
        """Report the plan, reuse known results, and return the remaining sizes, in one group of workers or one group
        each."""
        self._announce()
        if not self.options.force:
            self._take_over()
        study_sizes = [size for size in self.study_sizes.values() if not size.is_complete]
        self._log_points()
        if not study_sizes:
            self.say("  everything is already measured; no worker starts")
            return []
        self.total = sum(size.num_missing for size in study_sizes)
        if not self.options.relaunch:
            return [study_sizes]
        random.Random(self.options.seed).shuffle(study_sizes)
        return [[size] for size in study_sizes]

    @property
    def turns(self) -> list[Repeat]:
        """Measurements of all sizes."""
        return [turn for size in self.study_sizes.values() for turn in size.turns]

    @property
    def hardware(self) -> list[dict[str, Any]]:
        """Each type of worker hardware, once."""
        kinds = [kind for turn in self.turns for kind in turn.hardware]
        return list({json.dumps(kind, sort_keys=True): kind for kind in kinds}.values())

    def _count_operations(self) -> None:
        """Count the operations of a sample, for MFU and for the planner."""
        job, rows = next(iter(self.study_sizes.values())).job, self.sources[TRAIN]
        try:
            few = rows.read(np.arange(2))
            self.profile = profile_workload(
                job.workload, few, self.config.precision, gives_tuples=job.splits[TRAIN].gives_tuples
            )
        except Exception as exc:  # whatever the counter cannot count, the study goes on without MFU
            text = first_line(exc)
            self.profile = text if isinstance(exc, UsageError) else f"{type(exc).__name__}: {text}"

    def _announce(self) -> None:
        q, first = self.options, next(iter(self.study_sizes.values()))
        *smaller, last = q.sizes
        sizes = f"{', '.join(map(str, smaller))} and {last} workers" if smaller else quantity(last, "worker")
        modes = " and ".join(mode for mode in MODES if mode in q.modes)
        self.say(f"study {self.folder.name}: {self.config.workload.name} on {sizes}, {modes} scaling")
        self.say(
            f"  {quantity(q.repeats, 'measurement')} of each of {quantity(len(self.study_sizes), 'point')} in random "
            f"order, each with at least {q.steps} steps and {q.seconds:g} s; {first.job.recipe.global_batch_size} "
            f"samples per step at the base"
        )
        if self.left_out:
            self.say(f"  {self.left_out}")
        if why := study_noise.why_no_noise(self.study_sizes.values()):
            self.say(f"  noise scale: not measured ({why})")

    def _take_over(self) -> None:
        for name, size in self.study_sizes.items():
            size.turns = self.known.turns(name)[-self.options.repeats :]
            if size.turns:
                names = ", ".join(dict.fromkeys(turn.study for turn in size.turns))
                self.say(f"  {name}: {len(size.turns)} measurements reused from {names} (--force measures them again)")
            if size.trains_to_target and (result := self.known.to_target(name)) is not None:
                size.to_target = result
                self.say(f"  {name}: training to the target reused")
            if size.measures_noise:
                size.noise = self.known.noise(name, noise_kind(self.config.noise_scale, size.trains_to_target))
                if size.noise is not None:
                    self.say(f"  {name}: noise scale reused")

    def keep(self, message: tuple[str, Result]) -> None:
        """Store a worker's result immediately and log every completed point to MLflow."""
        name, result = message
        if isinstance(result, RankSample):
            return self.metrics.take_sample(result) if self.metrics is not None else None
        size = self.study_sizes[name]
        workers = quantity(size.workers, "worker")
        if isinstance(result, Repeat):
            # what is measured by workers of its own shares nothing with others
            round_number = None if self.options.relaunch else result.round
            turn = dataclasses.replace(result, study=self.folder.name, round=round_number)
            size.turns.append(turn)
            self.known.keep(name, TURN, turn, at=turn.measured_at)
            self.num_taken += 1
            self.under_way.advance()
            ms = 1e3 * statistics.median(turn.step_times_s)
            self.say(
                f"  [{self.num_taken}/{self.total}] {workers}, batch {size.job.recipe.global_batch_size}: "
                f"{ms:.4g} ms a step, {len(turn.step_times_s)} steps"
            )
        elif isinstance(result, ToTarget):
            size.to_target = result
            self.known.keep(name, TARGET, result, at=time.time())
            how = "reached" if result.is_reached else "missed"
            self.say(f"  {workers}: target {how} after {result.samples} samples and {result.time_s:.3g} s")
        elif isinstance(result, NoiseHistory):
            size.noise = result
            kind = noise_kind(self.config.noise_scale, size.trains_to_target)
            self.known.keep(name, kind, result, at=time.time())
            self.say(f"  {workers}: gradient noise scale {study_noise.to_text(result)}")
        elif result not in self.said:
            self.said.add(result)
            self.say(f"  note ({workers}): {result}")
        self._log_points()

    def _log_points(self) -> None:
        """Log every complete point that was not logged yet."""
        for mode, known in self._sizes_by_mode():
            if known.is_complete and (mode, known.name) not in self.points:
                point = point_of(mode, known, self.config, profile=self.profile, study=self.folder.name)
                self.points[mode, known.name] = point
                self.mlflow.log_point(point)

    def _sizes_by_mode(self) -> Iterator[tuple[Mode, StudySize]]:
        """Pairs of a curve and a size on it, curve by curve."""
        return ((mode, size) for mode in MODES for size in self.study_sizes.values() if mode in size.modes)

    def count_for_planner(self) -> None:
        """Count the model's operations if the planner's law for a curve needs them and they are unknown."""
        is_emulated = any(turn.is_emulated for turn in self.turns)
        if len(self.options.sizes) > 1 and isinstance(self.profile, str) and not is_emulated:
            self._count_operations()

    def record(self) -> StudyRecord:
        """The record of the study as measured so far."""
        config, study = self.config.study, self.folder.name
        points = [
            self.points.get((mode, size.name)) or point_of(mode, size, self.config, profile=self.profile, study=study)
            for mode, size in self._sizes_by_mode()
            if size.turns
        ]
        points += points_of_others(self.more, points, self.options.modes)
        curves: list[Curve] = []
        notes: list[str] = []
        for mode in MODES:
            if own := [point for point in points if point.mode == mode]:
                per_node = self.workers_per_node
                laws, note = planner_laws(self.config, self.profile, own, self.hardware, workers_per_node=per_node)
                # workers that sleep or share cores stay where they are, however many
                stays = any(mark in (EMULATED, OVERSUBSCRIBED) for point in own for mark in point.marks)
                price, most = config.price_per_worker_hour, None if stays else per_node
                curves.append(as_curve(mode, own, price_per_worker_hour=price, laws=laws, workers_per_node=most))
                notes.append(note)
        placements = {
            size.name: turn.placement
            for size in self.study_sizes.values()
            for turn in size.turns
            if turn.study == study
        }
        topology = {**self.conditions.topology, "placement of workers": placements, "workers": self.hardware}
        return StudyRecord(
            name=study,
            command=self.command,
            config=self.config.to_dict(),
            conditions=dataclasses.replace(self.conditions, topology=topology),
            curves=curves,
            price_per_worker_hour=config.price_per_worker_hour,
            currency=config.currency,
            marks=list(dict.fromkeys(mark for point in points for mark in point.marks)),
            words=words_of(curves, points, str(self.config.stop.at), [*notes, self.left_out]),
            model_profile=None if isinstance(self.profile, str) else self.profile.to_dict(),
            noise=study_noise.resolved(study_noise.surest(points)),
            started_at=self.started_at,
            duration_s=steady_time() - self.started_at,
            tracking_uri=self.mlflow.tracking_uri,
            folder=without_password(self.folder.path),
        )

    def _leave(self, status: str) -> None:
        """Store the measurements and log how to continue; errors here never hide the error that ended the study."""
        if self.has_left:
            return
        self.has_left = True
        if not self.has_run:  # the answer may be lost of a run that was made
            with contextlib.suppress(Exception):  # MLflow does not answer, which may be what ended the study
                uri, experiment = store.resolve_uri(self.config.tracking.uri), self.config.tracking.experiment
                key = key_of(self.folder.name, self.started_at)
                store.mark_left_running(uri, key, status=status, reason="ended at its start", experiment=experiment)
            return
        count = len(self.turns)
        try:
            self.write(self.record(), status) if count else self.mlflow.finish(None, status=status)
        except Exception:  # no record can be made yet, or no file written
            self.mlflow.finish(None, status=status)
        if count:
            same = "the same command without --force" if self.options.force else "the same command"
            kept = "1 measurement is" if count == 1 else f"{count} measurements are"
            self.say(f"  {kept} stored: {same} continues from there")

    def write(self, record: StudyRecord, status: str = "FINISHED") -> StudyRecord:
        """Write the record and the report, in its folder and in MLflow."""
        from scaleray.studies.study_page import write_study_report  # it imports matplotlib

        return self.write_with(record, write_study_report, status)
