"""One run under Ray Train: run its workers, restart them if that helps, and show their messages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scaleray.common.printed import quantity
from scaleray.common.progress import stage
from scaleray.common.stop_signals import on_sigterm
from scaleray.data import RaySources, Split
from scaleray.data.source_interface import Source
from scaleray.errors import LeftEarly, RunFailedError, ScaleRayError
from scaleray.launch.cluster.connection import alive_nodes, input_cpus, own_placement_groups, remove_placement_groups
from scaleray.launch.workers.coordinator_actor import spawn_coordinator
from scaleray.launch.workers.hang_reports import explain_hang
from scaleray.launch.workers.lost_workers import (
    SILENT_S,
    cause_of,
    death,
    explain,
    failed_step,
    fatal_error,
    is_echo,
    last_line,
    silent_worker,
    tail,
    was_preempted,
    what_failed,
)
from scaleray.launch.workers.ray_train import torch_trainer, without_watcher_notice
from scaleray.launch.workers.recorder_actor import RemoteRecorder
from scaleray.records.run_record import EventRecord, Heartbeat, Show
from scaleray.training.assignment import Assignment, train_worker
from scaleray.training.setup.job import TrainJob

POLL_S = 0.5
SAME_FAILURE_S = 3.0  # failures this close are one: a new group of workers takes longer to start
RECORDER_LOST = "the recorder's process was lost repeatedly"


class Interrupted(Exception):
    """The user stopped the run, by Ctrl-C or `ray job stop`."""


def fit(
    job: TrainJob,
    sources: dict[str, Source],
    recorder: RemoteRecorder,
    *,
    run_path: str,
    facts: Mapping[str, Any],
    can_be_preempted: bool,
    show: Show,
) -> None:
    """Run the job's workers to the end. Raises UsageError, RunFailedError or Interrupted.

    run_path: the run's folder, for checkpoints and Ray Train's own files. facts: about the run, for every checkpoint.
    """
    import ray

    config, max_failures = job.config, job.config.scale.max_failures
    # Ray Train's notice waits for all workers, of which spares do not take part
    can_be_preempted = can_be_preempted and not config.recovery.is_on
    streamed = {name: source.dataset for name, source in sources.items() if Split.of(name, source).is_streamed}  # type: ignore[attr-defined]
    with stage("preparing the launch"):
        stored = {name: ray.put(source) for name, source in sources.items() if name not in streamed}
        assignment = Assignment(
            job=job,
            sources=RaySources(stored, input_cpus(config, alive_nodes())),
            recorder=recorder.actor,
            run_path=run_path,
            facts=facts,
            published_as=recorder.published_as,
            can_be_preempted=can_be_preempted,
        )
    # the watcher costs a process, so only where a node can be taken away
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "1" if can_be_preempted else "0"
    first_stage = f"starting {quantity(job.config.scale.max_workers, 'worker')}"
    with (
        without_watcher_notice(),
        _showing(recorder, show, first_stage) as watcher,
        _stop_on_sigterm(recorder, config.checkpoint.grace_s),
    ):
        others = own_placement_groups()
        for attempt in itertools.count(1):
            lost = _fit_once(assignment, streamed, attempt, recorder, watcher)
            if lost is None:
                if config.checkpoint.memory is not None:
                    from scaleray.training.recovery.node_holders import end_holders

                    end_holders(run_path)
                return
            if watcher.can_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray's own would wait for the old controller
            what = "Ray Train's controller"
            if recorder.is_lost():
                if attempt > max_failures:
                    raise RunFailedError(RECORDER_LOST) from lost
                what = "the recorder's process"
                recorder.respawn()
                watcher.begin_again()
            text = f"{what} was lost; starting again from the newest checkpoint, {attempt} of {max_failures}"
            recorder.log([EventRecord(text, kind="warning")])
            _wait_for_silence(recorder)
            remove_placement_groups(own_placement_groups() - others)


def _fit_once(
    assignment: Assignment, streamed: dict[str, Any], attempt: int, recorder: RemoteRecorder, watcher: _Watcher
) -> BaseException | None:
    """Run workers to the end and return None, or return the error if Ray Train's controller or the recorder was lost,
    after which workers can restart. attempt: counted from 1. Raises errors that end the run."""
    import ray
    import ray.train

    config, scale = assignment.job.config, assignment.job.config.scale
    # a folder of its own each time: from an old one Ray would try to restore its snapshot
    folder = "ray_train" if attempt == 1 else f"ray_train-{attempt}-{secrets.token_hex(2)}"
    try:
        trainer = torch_trainer(
            config,
            train_worker,
            dataclasses.replace(
                assignment,
                recorder=recorder.actor,
                coordinator=spawn_coordinator(config, recorder.actor) if config.recovery.is_on else None,
            ),
            num_workers=(scale.min_workers, scale.max_workers) if scale.is_elastic else scale.max_workers,
            name=recorder.description.run_name,  # which Ray's own metrics of the run have as a label
            storage_path=f"{assignment.run_path}/{folder}",
            max_failures=-1 if config.recovery.is_on else scale.max_failures,
            num_spares=config.recovery.spares if config.recovery.is_on else None,
            callbacks=[
                restart_callback(
                    recorder.actor, scale.max_failures, assignment.run_path, replaces=config.recovery.is_on
                )
            ],
            datasets=streamed,
        )
        trainer.fit()
        return None if not recorder.is_lost() else watcher.error or RunFailedError(RECORDER_LOST)
    except (KeyboardInterrupt, SystemExit) as exc:
        if not watcher.has_lost_recorder:
            raise (watcher.error or Interrupted()) from exc
        return exc
    # a controller that died is an actor error, which Ray does not count among training failures
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as exc:
        if not recorder.is_lost():
            recorder.wait_started(0)  # if MLflow was the reason, that is what the user must read
            if not isinstance(exc, ray.exceptions.RayActorError) or attempt > scale.max_failures:
                error = explain(exc, recorder.heartbeats())
                raise (Interrupted() if isinstance(error, LeftEarly) else error) from exc
        return exc


def restart_callback(recorder: Any, max_failures: int, run_path: str, *, replaces: bool = False) -> Any:
    """Make the callback that Ray calls in its controller when workers fail. It reports the failure, and refuses a
    restart that cannot help. run_path: the run's folder, with the workers' reports of their activity. replaces: whether
    Ray replaces only the failed workers; then only losses without a step between them count."""
    import ray
    from ray.train import UserCallback

    class Restart(UserCallback):
        def __init__(self) -> None:
            self.restarts = self.step = 0
            self.called_at = -math.inf
            self.failed_at = -1  # the furthest step that the workload's own code failed in

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            before, self.called_at = self.called_at, time.monotonic()
            if self.called_at - before < SAME_FAILURE_S:
                return  # Ray waits for the end of a preemption, and calls at every look
            if (fatal := fatal_error(worker_exceptions, self.failed_at, is_restart=before > 0)) is not None:
                logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)  # the driver says it, once
                if isinstance(fatal, RunFailedError) and not isinstance(fatal, LeftEarly):
                    beats = last_beats()
                    failed = [r for r, e in worker_exceptions.items() if cause_of(e) is fatal]
                    last_lines = tail(next((b for b in beats if b.rank in failed), None))
                    fatal = type(fatal)(f"{fatal}{last_lines}")
                raise fatal  # Ray starts nothing again after an error of its callbacks
            self.failed_at = max([self.failed_at, *map(failed_step, worker_exceptions.values())])
            if replaces:
                self._count_replaced(worker_exceptions)
                return
            is_preempted = any(map(was_preempted, worker_exceptions.values()))
            self.restarts += not is_preempted
            beats = heartbeats(worker_exceptions)
            text = what_failed(worker_exceptions, beats, explain_hang(run_path, beats))
            if self.restarts > max_failures and not is_preempted:
                logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)
                raise RunFailedError(text)  # Ray would end the run too, but knows less
            count = "its node was taken away" if is_preempted else f"{self.restarts} of {max_failures}"
            text = f"{text}\n  starting again from the newest checkpoint, {count}"
            recorder.log.remote([EventRecord(text, kind="warning")])

        def _count_replaced(self, failures: dict[int, Exception]) -> None:
            step = max((beat.step for beat in last_beats()), default=0)
            self.restarts = 1 if step > self.step else self.restarts + 1
            self.step = max(step, self.step)
            text = "; ".join(f"worker {number}: {death(error)}" for number, error in failures.items())
            if self.restarts > max_failures:
                raise RunFailedError(f"{text}\n  {self.restarts} workers were lost with no complete step in between")
            recorder.log.remote(
                [EventRecord(f"{text}; Ray starts another spare as soon as there is room for it", kind="warning")]
            )

    def last_beats() -> list[Heartbeat]:
        try:
            return list(ray.get(recorder.heartbeats.remote(), timeout=30))
        # it would end the run: Ray starts nothing again after an error of its callbacks
        except ray.exceptions.RayError:
            return []

    def heartbeats(failures: Mapping[int, BaseException]) -> list[Heartbeat]:
        deadline = time.monotonic() + 2 * SILENT_S
        while True:
            beats = last_beats()
            # where all that failed only miss somebody, that one falls silent in a moment, if it is not so already
            if (
                not all(map(is_echo, failures.values()))
                or silent_worker(failures, beats)
                or time.monotonic() > deadline
            ):
                return beats
            time.sleep(0.5)

    return Restart()


def _wait_for_silence(recorder: RemoteRecorder, *, silent_s: float = 3.0, timeout_s: float = 60.0) -> None:
    """Wait until the workers of a dead controller are gone, before new ones write the same checkpoints."""
    deadline = time.monotonic() + timeout_s
    while recorder.silent_s() < silent_s and time.monotonic() < deadline:
        time.sleep(0.5)


class _Watcher:
    """Polls the recorder in a thread while the driver waits for Ray. error: reason why the recorder could not start.
    has_lost_recorder: whether its process is gone, on which this thread interrupts the driver."""

    def __init__(self, recorder: RemoteRecorder, show: Show, first_stage: str) -> None:
        self.recorder, self.show, self.first_stage = recorder, show, first_stage
        self.error: ScaleRayError | None = None
        self.position = 0
        self.has_lost_recorder = False
        self.stop = threading.Event()
        self.can_interrupt = threading.current_thread() is threading.main_thread()
        self._start()

    def _start(self) -> None:
        self.starting = contextlib.ExitStack()
        self.starting.enter_context(stage(self.first_stage))
        self.thread = threading.Thread(target=self.watch, name="scaleray-show", daemon=True)
        self.thread.start()

    def begin_again(self) -> None:
        """Watch the replacement of a lost recorder."""
        self.end()
        self.stop.clear()
        self.error, self.position, self.has_lost_recorder = None, 0, False
        self._start()

    def end(self) -> None:
        """Stop watching."""
        self.stop.set()
        self.thread.join(timeout=10)
        self.starting.close()

    def show_new(self) -> None:
        self.position, messages = self.recorder.poll(self.position)
        if any(isinstance(message, Heartbeat) for message in messages):
            self.starting.close()  # they run
        if messages:
            self.show(messages)

    def watch(self) -> None:
        import ray

        is_started = False
        while not self.stop.wait(POLL_S):
            try:
                is_started = is_started or self.recorder.wait_started(0)
                self.show_new()
            except ScaleRayError as exc:  # a run that cannot be recorded is not worth its time
                self.error = exc
                if self.can_interrupt:
                    signal.raise_signal(signal.SIGINT)
                return
            except ray.exceptions.ActorDiedError as exc:
                if self.stop.is_set():
                    return
                # nothing would be recorded any more, and no checkpoint come to exist
                self.has_lost_recorder = True
                self.error = RunFailedError(f"the recorder's process was lost: {last_line(exc)}")
                if self.can_interrupt:
                    signal.raise_signal(signal.SIGINT)
                return
            except ray.exceptions.RayError:
                continue  # it did not answer in time


@contextlib.contextmanager
def _showing(recorder: RemoteRecorder, show: Show, first_stage: str) -> Iterator[_Watcher]:
    """Pass the recorder's messages to `show` during the context, and the remaining ones at its end. first_stage:
    activity shown until the first message."""
    import ray

    watcher = _Watcher(recorder, show, first_stage)
    try:
        yield watcher
    finally:
        watcher.end()
        with contextlib.suppress(ray.exceptions.RayError, ScaleRayError):
            with stage("starting MLflow"):
                recorder.wait_started(60.0)  # a short training can end first, and no message is taken before
            recorder.drain()
            watcher.show_new()


@contextlib.contextmanager
def _stop_on_sigterm(recorder: RemoteRecorder, grace_s: float) -> Iterator[None]:
    """Handle SIGTERM: save and exit, or behave as on Ctrl-C after `grace_s`.

    `ray job stop` sends SIGTERM and, three seconds later, SIGKILL. On a loaded machine, three seconds may be too short
    to release everything, so the recorder is notified first."""
    timers: list[threading.Timer] = []

    def tell() -> None:
        recorder.actor.mark_killed.remote()
        recorder.actor.request_stop.remote()

    def leave() -> None:
        # in a thread: the main one may be inside Ray, holding what a remote call needs
        threading.Thread(target=tell, daemon=True).start()
        timers.append(threading.Timer(grace_s, signal.raise_signal, [signal.SIGINT]))
        timers[-1].daemon = True
        timers[-1].start()

    try:
        with on_sigterm(leave):
            yield
    finally:
        for timer in timers:
            timer.cancel()
