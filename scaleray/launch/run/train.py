"""`train`: from a config to a finished, recorded run.

Everything that can be refused is refused before workers start."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import StoredFile
from scaleray.checkpoints.model_layout import ADAPTERS, FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.checkpoints.storage import remove_parts
from scaleray.checkpoints.weight_sums import sums_name
from scaleray.common.fingerprint import environment
from scaleray.common.options import takes
from scaleray.common.own_folder import keep_compiled_code_here
from scaleray.common.progress import stage
from scaleray.common.stop_signals import sigterm_like_ctrl_c
from scaleray.common.watchers import Guard, Watcher
from scaleray.config import RunConfig
from scaleray.config.base import without_password
from scaleray.config.brought import with_brought
from scaleray.config.recipe.derive import derive, resolve_strategy
from scaleray.data import TRAIN, Split, load_sources, preprocessing
from scaleray.data.as_source import preprocessor_of
from scaleray.data.column_distributions import described
from scaleray.data.source_interface import Source
from scaleray.data.user_dataset import refuse_unsendable
from scaleray.errors import (
    MARKED_KILLED,
    ClusterError,
    ConfigError,
    LeftEarly,
    ScaleRayError,
    StorageError,
    TrackingError,
    UsageError,
    first_line,
    text_of,
)
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster import driver_guard
from scaleray.launch.cluster.awaited_nodes import nodes_for
from scaleray.launch.cluster.capacity import check_capacity
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.run.announcement import announcement
from scaleray.launch.run.prediction import prediction
from scaleray.launch.run.record import (
    as_yaml,
    checkpoint_facts,
    describe,
    end_tags,
    make_record,
    point_metrics,
    why_stopped,
)
from scaleray.launch.run.resume import Request, make_request
from scaleray.launch.run.run_flop_count import counted_flops
from scaleray.launch.run.train_options import TrainOptions
from scaleray.launch.run.trainer import Interrupted, fit
from scaleray.launch.session.alert_targets import alert_settings
from scaleray.launch.session.conditions import check_same_data
from scaleray.launch.session.config_argument import Config, whole_config
from scaleray.launch.session.experiment import check_policy
from scaleray.launch.session.opened import check_learning_rate, check_started_once, forbid_ray, with_absolute_paths
from scaleray.launch.session.run_folder import RunFolder
from scaleray.launch.workers import local_run
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.launch.workers.recorder_actor import RemoteRecorder
from scaleray.live.metrics_endpoint import chosen_port
from scaleray.recording import store
from scaleray.recording.find_record import ARTIFACTS
from scaleray.recording.recorder import Recorder
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import EventRecord, RunRecord, Say, Show
from scaleray.records.start import DATA, IMPORTS, RAY, StartClock, steady_time
from scaleray.records.worker_requests import TraceRequest
from scaleray.training.health import stray_runs
from scaleray.training.setup.job import TrainJob
from scaleray.training.state import final_weight_files as final_weights
from scaleray.workload import make_workload

IMPORTED_AT = steady_time()
Weights = Mapping[str, Mapping[str, StoredFile]]
"""Hashes of files of final weights, by name of the weights and then of the file."""


@takes(TrainOptions)
def train(
    config: Config | None,
    workload: Any = None,
    *,
    options: TrainOptions,
    progress: bool | None = None,
    show: Show | None = None,
    say: Say | None = None,
    expect_steps: Callable[[int], None] | None = None,
    base_dir: Path | None = None,
    started_at: float | None = None,
) -> RunRecord:
    """Train a workload with a config and return the run's record.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections; None, with `resume`, is the config of
    that run. workload: an instance or class, which may be defined in a notebook; None loads the config's. progress:
    whether to show a live table; None shows one on a terminal or in a notebook. show: receives the run's messages as
    they arrive; say: receives lines about other progress; expect_steps: receives the training's length once it is
    known. base_dir: folder to which a RunConfig's paths are relative. started_at: wall clock from which the time to the
    first step is counted; None: now.

    Raises UsageError for errors of use, RunFailedError for a failed run, and KeyboardInterrupt for a stopped one; the
    MLflow run is then marked FAILED or KILLED."""
    from scaleray.live.terminal.notebook import Silent, watching

    is_shown = show is None and say is None and progress is not False
    with watching(always=bool(progress)) if is_shown else contextlib.nullcontext(Silent()) as display:
        return run_training(
            config,
            workload,
            options=options,
            show=show or display.show,
            say=say or display.say,
            expect_steps=expect_steps or display.expect_steps,
            base_dir=base_dir,
            started_at=started_at,
        )


def run_training(
    config: Config | None,
    workload: Any,
    *,
    options: TrainOptions,
    show: Show,
    say: Say,
    expect_steps: Callable[[int], None],
    base_dir: Path | None,
    started_at: float | None = None,
    in_processes: bool = False,
    trace: TraceRequest | None = None,
    probes_links: bool = False,
) -> RunRecord:
    """Train as `train` does, without a display.

    in_processes: with `local`, allow several workers, as gloo processes on this machine. trace: traces to take of the
    last steps, into the run's folder. probes_links: measure each pair of workers at the end."""
    start = StartClock(started_at or steady_time(), {IMPORTS: IMPORTED_AT})
    display = Guard()
    show, say, expect_steps = (display.wrapped(Watcher.DISPLAY, tell) for tell in (show, say, expect_steps))
    check_started_once(say)
    mlflow_runs = stray_runs.run_ids()
    if config is not None:
        config, base_dir = whole_config(config, workload, base_dir)
        config = with_absolute_paths(config)
    local = options.local
    made = workload

    def settled(config: RunConfig, base_dir: Path | None) -> RunConfig:
        nonlocal made
        made = make_workload(made, config.workload.name, config.workload.args, base_dir=base_dir)
        return with_brought(config, made)

    config, request = make_request(
        config, base_dir, resume=options.resume, allow_change=options.allow_change, say=say, settled=settled
    )
    if (finished := request.finished_record(say)) is not None:
        say(f"run {finished.name} already finished after {finished.steps} steps, so there is nothing to do")
        return finished
    resolve_strategy(config)
    _check_number_of_workers(config, local=local and not in_processes)
    if request.before is None:
        check_degrees(config)
    tracking_uri = store.resolve_uri(config.tracking.uri)
    store.check_reachable(tracking_uri)
    check_policy(config)
    port = chosen_port(config.monitoring.port)
    alert_settings(config.alerts)  # for its errors: the recorder asks for it when all data are read
    config, workload = settled(config, request.base_dir), made
    check_learning_rate(config, workload)
    folder = RunFolder.reserve(config) if request.before is None else RunFolder.reopen(request.before.path)
    try:
        with (
            sigterm_like_ctrl_c(),
            _guarded(config, request, folder, tracking_uri),
            _environment(config, local=local, say=say) as (config, topology),
            sigterm_like_ctrl_c(),  # Ray has put its own handler in place, which ends the process with a stack of C++
        ):
            if not local:
                start.end(RAY)
            fitted = preprocessing.load(folder.path) if request.before else None
            sources = load_sources(workload, fitted=fitted, in_steps=config.is_in_steps)
            if not local:
                refuse_unsendable(sources)
                if found := stray_runs.stray(mlflow_runs):  # workers look for their own
                    say(found)
            run = _Run(config, request, workload, sources, folder, tracking_uri, topology, show, start, port)
            traced = None if trace is None else trace.into(folder.path)
            run.job = run.job.changed(trace=traced, probes_links=probes_links, mlflow_runs=mlflow_runs)
            check_layout(run.job, sources[TRAIN])
            expect_steps(run.recipe.total_steps)
            lines = announcement(request, run.job, data=run.data, folder=folder, local=local, port=port)
            for line in (*lines, *run.prediction.lines()):
                say(line)
            return run.train(local=local)
    except BaseException:
        folder.remove_if_empty()
        raise
    finally:
        if folder.is_local:
            remove_parts(folder.path)  # those of workers that were killed
        folder.unlock()


def _check_number_of_workers(config: RunConfig, *, local: bool) -> None:
    if local and config.scale.max_workers > 1:
        raise ConfigError(
            "scale.workers",
            str(config.scale.workers),
            "--local runs one worker in this process",
            "leave --local out, or use --scale.workers 1: the global batch, and so the training, is the same",
        )


def check_degrees(config: RunConfig) -> None:
    """Refuse degrees on a single worker, which have no effect, and those whose product is not the number of workers."""
    asked = {name: degree for name, degree in config.parallel if isinstance(degree, int) and degree > 1}
    if config.scale.max_workers == 1 and asked:
        least = config.parallel.least_workers(config.strategy.name)
        text = " x ".join(f"{name} {degree}" for name, degree in asked.items())
        allowed = f"scale.workers is 1, and must be a multiple of {least}"
        raise ConfigError("parallel", text, allowed, f"use --scale.workers {least}, or leave the degrees out")
    if isinstance(config.scale.workers, int):
        config.degrees()  # before Ray starts, which may have room for fewer workers


def check_layout(job: TrainJob, train: Source) -> None:
    """Refuse a layout that does not suit the model or its sequences, before workers start."""
    degrees = job.degrees
    if max(degrees.pipeline, degrees.context, degrees.tensor, degrees.expert) == 1:
        return
    from scaleray.training.layout_check import check_layout as check  # with torch, which other runs do not need here

    split = job.splits[TRAIN]
    rows = {} if split.is_streamed else train.read(np.arange(min(2, train.num_rows)))
    with stage("checking the layout"):
        check(job.workload, job.config, degrees, rows, gives_tuples=split.gives_tuples)


def _guarded(
    config: RunConfig, request: Request, folder: RunFolder, tracking_uri: str
) -> contextlib.AbstractContextManager[None]:
    """Context in which another process marks the run if this one is killed."""
    return driver_guard.guarding(
        command="scaleray train",
        folder=folder.path,
        hint=f"scaleray train --resume {shlex.quote(folder.path)}, or the same command with --resume auto",
        uri=tracking_uri,
        experiment=config.tracking.experiment,
        experiment_id=request.before.about.get("experiment_id") if request.before else None,
    )


@contextlib.contextmanager
def _environment(config: RunConfig, *, local: bool, say: Say) -> Iterator[tuple[RunConfig, list[dict[str, Any]]]]:
    """Yield the run's nodes, either this process or a connected cluster that can hold the run, and the config with the
    settings that depend on them."""
    if local:
        forbid_ray()
        keep_compiled_code_here()
        config = with_gpus_decided(config, None, say=say)
        if config.scale.gpus:
            import torch

            if not torch.cuda.is_available():
                raise ClusterError(
                    "scale.gpus_per_worker",
                    config.scale.gpus,
                    "this machine has no CUDA device",
                    "use --scale.gpus-per-worker 0",
                )
        yield config, [{"node": "local"}]
        return
    with cluster.connected(config):
        nodes = nodes_for(config)
        config = with_gpus_decided(config, nodes, say=say)
        check_capacity(config, nodes)
        yield config, cluster.topology(nodes)


class _Run:
    def __init__(
        self,
        config: RunConfig,
        request: Request,
        workload: Any,
        sources: dict[str, Source],
        folder: RunFolder,
        tracking_uri: str,
        topology: list[dict[str, Any]],
        show: Show,
        start: StartClock,
        port: int | None,
    ) -> None:
        before = request.before
        self.config, self.sources, self.folder = config, sources, folder
        self.tracking_uri, self.topology, self.show = tracking_uri, topology, show
        self.before, self.base_dir, self.changed = before, request.base_dir, request.changed
        splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
        self.recipe, self.port = derive(config, splits[TRAIN].size), port
        self.prediction = prediction(config, self.recipe, run_path=folder.path)
        self.facts: dict[str, Any] = {"environment": environment(), "topology": topology}
        readers = "worker" if topology[0]["node"] == "local" else config.data.readers
        self.data = {name: described(source, splits[name], readers) for name, source in sources.items()}
        if before is not None:
            known = (before.newest.facts.get("data") or {}) if before.newest else {}
            advice = "resume with the same data, or start a new run from its weights: --workload.weights RUN_FOLDER"
            check_same_data(known.get(TRAIN), self.data[TRAIN].get("sha256"), what="run", advice=advice)
        start.end(DATA)
        self.job = TrainJob(config, self.recipe, workload, splits, start.started_at, start_ends=start.ends)
        if config.scale.is_elastic:
            self._check_every_size()

    def _check_every_size(self) -> None:
        """Refuse an elastic training that would fail with another number of workers."""
        scale = self.config.scale
        if self.job.splits[TRAIN].is_streamed:
            raise ConfigError(
                "scale.workers",
                str(scale.workers),
                "a Ray Dataset is divided once, for a fixed number of workers",
                "give one number of workers, or data that can be read by index",
            )
        for workers in range(scale.min_workers, min(scale.max_workers, scale.min_workers + 1000)):
            self.job.on(workers)

    def train(self, *, local: bool) -> RunRecord:
        description = describe(
            self.job,
            data=self.data,
            facts=self.facts,
            folder=self.folder,
            tracking_uri=self.tracking_uri,
            base_dir=self.base_dir,
            continues=self.before.about if self.before else None,
            changes=self._changes(),
            port=self.port,
            expected_samples_per_s=self.prediction.samples_per_s,
        )
        driver_guard.note(key=description.run_id)
        recorder, work = self._prepared(description, local=local)
        if (fitted := preprocessor_of(self.sources[TRAIN])) is not None:
            preprocessing.save(fitted, self.folder.path)
        weights: Weights = {}
        try:
            if self.before is not None:
                final_weights.forget(self.folder.path)
            with counted_flops(self.job, self.sources, recorder.log):
                work()
            recorder.wait_started()
            if self.config.checkpoint.save_final:
                weights = self._complete_weights()  # every worker has ended, and nobody waits for this
        except (Interrupted, KeyboardInterrupt, LeftEarly) as exc:
            alert = why_stopped(recorder)
            _, is_marked = self._end(recorder, "KILLED", alert or "stopped by the user")
            raise (LeftEarly(alert) if alert else KeyboardInterrupt(*[MARKED_KILLED] * is_marked)) from exc
        except BaseException as exc:
            record, _ = self._end(recorder, "FAILED", text_of(exc) or type(exc).__name__)
            if isinstance(exc, UsageError) and self.before is None and record is not None and not record.steps:
                self._withdraw(record)
            raise
        try:
            with stage("writing the record"):
                return self._finished(recorder, weights)
        finally:
            recorder.close()

    def _finished(self, recorder: Recorder | RemoteRecorder, weights: Weights) -> RunRecord:
        """End a run whose training is complete; if the recorder is lost meanwhile, repeat this with a new one."""
        try:
            return self._finish(recorder, "FINISHED", "", weights)
        except ScaleRayError:
            raise
        except Exception:
            if not isinstance(recorder, RemoteRecorder) or not recorder.is_lost():
                raise
            self.show([EventRecord("the recorder was lost at the end of the run and is replaced", kind="warning")])
            recorder.respawn()
            recorder.wait_started()
            return self._finish(recorder, "FINISHED", "", weights)

    def _prepared(
        self, description: RunDescription, *, local: bool
    ) -> tuple[Recorder | RemoteRecorder, Callable[[], None]]:
        """Return the run's recorder, started or starting, and the function that trains to the end."""
        facts = checkpoint_facts(self.folder.name, self.config, self.data, self.facts)
        common: dict[str, Any] = {"run_path": self.folder.path, "facts": facts, "show": self.show}
        if local:
            recorder = Recorder(description)
            recorder.start()
            run = local_run.run_in_processes if self.config.scale.max_workers > 1 else local_run.run_here
            return recorder, partial(run, self.job, self.sources, recorder, **common)
        with stage("preparing the launch"):
            ship_user_code(self.job.workload)
            remote = RemoteRecorder(description, publishes=cluster.publishes_metrics(self.config))
        # one node alone has no other to go on with
        can_be_preempted = len(self.topology) > 1
        return remote, partial(fit, self.job, self.sources, remote, can_be_preempted=can_be_preempted, **common)

    def _complete_weights(self) -> Weights:
        """Files of the final weights in the run folder, and of the trained weights if the final ones are an average."""
        names = [FINAL_WEIGHTS, *([TRAINED_WEIGHTS] if self.config.averaging.decay is not None else [])]
        if self.config.fine_tuning.lora_rank and self.config.fine_tuning.merge:
            names.append(ADAPTERS)  # a checkpoint has them, too, and MLflow the sum
        return {name: final_weights.complete(self.folder.path, name) for name in names}

    def _changes(self) -> list[str]:
        step = self.before.newest.step if self.before and self.before.newest else 0
        return [f"after step {step}: {change}" for change in self.changed]

    def _withdraw(self, record: RunRecord) -> None:
        """Withdraw a run that was refused before its first step, so that it is not recorded as failed and its name is
        free again."""
        with contextlib.suppress(Exception):  # the refusal is what the user reads
            if self.folder.remove_without_checkpoints():
                store.delete_run(self.tracking_uri, record.run_id)

    def _end(self, recorder: Recorder | RemoteRecorder, status: str, reason: str) -> tuple[RunRecord | None, bool]:
        """End an unfinished run in MLflow, if it exists there, and log how to continue it; the caller raises the error
        that ended it. Returns its record, if any, and whether MLflow has its end."""
        record, is_marked = None, False
        try:
            if recorder.wait_started(60.0):
                record = self._finish(recorder, status, reason)
                is_marked = not record.unsent_file
        except TrackingError:
            pass  # this is what ended the run, or as good as that
        except StorageError as exc:  # MLflow has the end
            is_marked = True
            self.show([EventRecord(first_line(exc), kind="warning")])
        except Exception as exc:  # the recorder may be what is lost; what ended the run must still be what is raised
            text = f"the run could not be marked {status} in MLflow: {type(exc).__name__}"
            with contextlib.suppress(Exception):  # MLflow does not answer either
                self._mark(recorder, status, reason)
                is_marked = True
                text = f"the recorder was lost; MLflow shows the run as {status}, without its last points and files"
            self.show([EventRecord(text, kind="warning")])
        with contextlib.suppress(Exception):  # what ended the run matters more
            newest = Catalog.of_run(self.folder.path, self.config.checkpoint.copy_path).newest()
            if newest is not None:
                command = f"scaleray train --resume {shlex.quote(without_password(self.folder.path))}"
                self.show([EventRecord(f"to continue after step {newest.step}: {command}", kind="hint")])
        recorder.close()
        return record, is_marked

    def _mark(self, recorder: Recorder | RemoteRecorder, status: str, reason: str) -> None:
        """Mark the run without its recorder. Raises MLflow's errors."""
        recorder.close()  # it may hang, and write later
        store.mark_left_running(
            self.tracking_uri,
            recorder.description.run_id,
            status=status,
            reason=reason,
            experiment=self.config.tracking.experiment,
            experiment_id=self.before.about.get("experiment_id") if self.before else None,
        )

    def _finish(
        self, recorder: Recorder | RemoteRecorder, status: str, reason: str, weights: Weights | None = None
    ) -> RunRecord:
        recording = recorder.drain()
        identity = recorder.identity()
        record = make_record(
            self.job,
            recording,
            identity,
            status=status,
            verdict=reason,
            data=self.data,
            facts=self.facts,
            folder=self.folder,
            tracking_uri=self.tracking_uri,
            weights={file: stored for files in (weights or {}).values() for file, stored in files.items()},
        )
        for name, files in (weights or {}).items():
            if files and name in ARTIFACTS:
                recorder.log_files(self.folder.local([*files, sums_name(next(iter(files)))]), ARTIFACTS[name])
        look = partial(Guard(lambda text: self.show([EventRecord(text, kind="warning")])), Watcher.RECORD)
        extras = look(lambda: {"environment.yaml": as_yaml(record.environment)}, {}, part="environment.yaml")
        unsent = recorder.finish(
            status,
            metrics=look(lambda: point_metrics(record), {}, part="metrics"),
            tags=look(lambda: end_tags(record), {}, part="tags"),
            files={"record.json": record.to_json(), **extras},
        )
        record = dataclasses.replace(record, unsent_file=unsent)
        self.folder.complete()
        if unsent:
            again = f"scaleray tracking replay {unsent} --uri {without_password(self.tracking_uri)}"
            text = f"MLflow did not accept everything; once it is available: {again}"
            self.show([EventRecord(text, kind="warning")])
        return record
