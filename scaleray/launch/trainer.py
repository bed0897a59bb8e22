"""One run under Ray Train: the recorder beside the driver, the workers, and what their failures mean."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scaleray.config import RunConfig
from scaleray.data.sources import Source
from scaleray.errors import (
    InitialisationError,
    InputStarvedError,
    LeftEarly,
    NonFiniteLossError,
    PeerLostError,
    RunFailedError,
    ScaleRayError,
    StepFailedError,
    UsageError,
)
from scaleray.launch.cluster import input_cpus
from scaleray.records import EventRecord, Heartbeat, WorkerMessage
from scaleray.tracking.recorder import RunDescription
from scaleray.training.job import Split, TrainJob
from scaleray.training.progress import HANG

if TYPE_CHECKING:
    from scaleray.training.worker import Assignment

Show = Callable[[Sequence[WorkerMessage]], None]
POLL_S = 0.5
WAIT_FOR_WORKERS_S = 30.0  # of the recorder, before it makes the MLflow run all the same
SILENT_S = 2.0  # without a sign of life, four times as long as between two of them
SAME_FAILURE_S = 3.0  # a new group of workers takes longer to start
CONTROLLER_FAILURE_LIMIT = 2  # Ray's default retries an impossible launch for ever


class Interrupted(Exception):
    """The user stopped the run: Ctrl-C, or `ray job stop`."""


def spawn_recorder(description: RunDescription) -> Any:
    """The recorder as an actor on the driver's node, where an SQLite file and the run's local folder are."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from scaleray.tracking.recorder import Recorder

    class PoliteRecorder(Recorder):
        """Gives way to workers on the same cores, while they start as much as while they train."""

        def __init__(self, description: RunDescription) -> None:
            os.nice(10)
            super().__init__(description)

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # several calls at once: workers' messages must not wait while the run is being made
    actor = ray.remote(PoliteRecorder).options(num_cpus=0, scheduling_strategy=here, max_concurrency=8)
    return actor.remote(description)


class RemoteRecorder:
    """The recorder actor, called like the plain object."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.started = actor.start.remote(after_first_message_s=WAIT_FOR_WORKERS_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import ray

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return ray.get(getattr(self.actor, name).remote(*args, **kwargs), timeout=180)
            except ray.exceptions.RayTaskError as exc:
                raise _cause(exc) from exc

        return call

    def close(self) -> None:
        """End the actor, whoever still holds a handle to it; what it had to write is written."""
        import ray

        with contextlib.suppress(Exception):  # it may be gone already
            ray.kill(self.actor)

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """True once the MLflow run exists; raises what went wrong. False when it is not decided in time."""
        import ray

        if timeout_s != 0:
            self.actor.log.remote([])  # somebody waits: it must not wait for workers any longer
        try:
            ray.get(self.started, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayTaskError as exc:
            raise _cause(exc) from exc
        return True


def fit(
    job: TrainJob, sources: dict[str, Source], recorder: RemoteRecorder, *,
    run_path: str, weights_path: str, facts: Mapping[str, Any], can_be_preempted: bool, show: Show,
) -> None:  # fmt: skip
    """Run the job's workers to the end. Raises UsageError, RunFailedError or Interrupted.

    run_path: the run's folder, for checkpoints and Ray Train's own files. facts: what every checkpoint says of the run.
    """
    import ray

    config = job.config
    from scaleray.training.worker import Assignment

    streamed = {name: source.dataset for name, source in sources.items() if Split.of(name, source).is_streamed}  # type: ignore[attr-defined]
    assignment = Assignment(
        job=job,
        sources={name: ray.put(source) for name, source in sources.items() if name not in streamed},
        recorder=recorder.actor,
        input_cpus=input_cpus(config),
        weights_path=weights_path,
        run_path=run_path,
        facts=facts,
        can_be_preempted=can_be_preempted,
    )
    # the watcher costs a process and prints an error at every start, so only where a node can be taken away
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "1" if can_be_preempted else "0"
    with _showing(recorder, show) as watcher, _stop_on_sigterm(recorder, config.checkpoint.grace_s):
        for attempt in itertools.count(1):
            try:
                _trainer(assignment, streamed, recorder, storage_path=run_path, attempt=attempt).fit()
                return
            except (KeyboardInterrupt, SystemExit) as exc:
                raise (watcher.error or Interrupted()) from exc
            # a controller that died is an actor error, which Ray does not count among training failures
            except (ray.train.TrainingFailedError, ray.exceptions.RayError) as exc:
                recorder.wait_started(0)  # if MLflow was the reason, that is what the user must read
                if isinstance(exc, ray.exceptions.RayActorError) and attempt <= config.scale.max_failures:
                    text = f"Ray Train's controller was lost; starting again from the newest checkpoint, {attempt} of {config.scale.max_failures}"
                    recorder.log([EventRecord(text, kind="warning")])
                    _wait_for_silence(recorder)
                    continue
                error = explain(exc, recorder.heartbeats())
                raise (Interrupted() if isinstance(error, LeftEarly) else error) from exc


def _trainer(
    assignment: Assignment, streamed: dict[str, Any], recorder: RemoteRecorder, *, storage_path: str, attempt: int
) -> Any:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from scaleray.training.worker import train_worker

    config = assignment.job.config
    scale = config.scale
    return TorchTrainer(
        train_worker,
        train_loop_config={"assignment": assignment},
        torch_config=TorchConfig(backend=collective_backend(config), timeout_s=int(scale.collective_timeout_s)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(scale.min_workers, scale.max_workers) if scale.is_elastic else scale.max_workers,
            use_gpu=scale.gpus_per_worker > 0,
            resources_per_worker=worker_resources(config),
            placement_strategy=scale.placement,
            label_selector=dict(scale.label_selector) or None,
            elastic_resize_monitor_interval_s=scale.resize_interval_s,
        ),
        run_config=ray.train.RunConfig(
            # a name of its own each time: under an old one Ray would try to restore its snapshot
            name="ray_train" if attempt == 1 else f"ray_train-{attempt}-{secrets.token_hex(2)}",
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(
                max_failures=scale.max_failures, controller_failure_limit=CONTROLLER_FAILURE_LIMIT
            ),
            callbacks=[restart_callback(recorder.actor, scale.max_failures)],
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
        datasets=streamed or None,
        dataset_config=ray.train.DataConfig(enable_shard_locality=True) if streamed else None,
    )


def restart_callback(recorder: Any, max_failures: int) -> Any:
    """Ray calls it in its controller when workers fail: says what happened, and refuses a restart that cannot help."""
    import ray
    from ray.train import UserCallback

    class Restart(UserCallback):
        def __init__(self) -> None:
            self.restarts = 0
            self.called_at = -math.inf
            self.failed_at = -1  # the furthest step that the workload's own code failed in

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            before, self.called_at = self.called_at, time.monotonic()
            if self.called_at - before < SAME_FAILURE_S:
                return  # Ray waits for the end of a preemption, and calls at every look
            if (fatal := fatal_error(worker_exceptions, self.failed_at, is_restart=before > 0)) is not None:
                logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)  # the driver says it, once
                if isinstance(fatal, RunFailedError) and not isinstance(fatal, LeftEarly):
                    beats = ray.get(recorder.heartbeats.remote(), timeout=30)
                    failed = [r for r, e in worker_exceptions.items() if _cause(e) is fatal]
                    tail = _tail(next((b for b in beats if b.rank in failed), None))
                    fatal = type(fatal)(f"{fatal}{tail}")
                raise fatal  # Ray starts nothing again after an error of its callbacks
            self.failed_at = max([self.failed_at, *map(_failed_step, worker_exceptions.values())])
            was_preempted = any(map(_was_preempted, worker_exceptions.values()))
            self.restarts += not was_preempted
            text = what_failed(worker_exceptions, heartbeats(worker_exceptions))
            if self.restarts > max_failures and not was_preempted:
                logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)
                raise RunFailedError(text)  # Ray would end the run too, but knows less
            count = "its node was taken away" if was_preempted else f"{self.restarts} of {max_failures}"
            text = f"{text}\n  starting again from the newest checkpoint, {count}"
            recorder.log.remote([EventRecord(text, kind="warning")])

    def heartbeats(failures: Mapping[int, BaseException]) -> list[Heartbeat]:
        deadline = time.monotonic() + 2 * SILENT_S
        while True:
            beats: list[Heartbeat] = ray.get(recorder.heartbeats.remote(), timeout=30)
            # where all that failed only miss somebody, that one falls silent in a moment, if it is not so already
            if not all(map(_is_echo, failures.values())) or _silent(failures, beats) or time.monotonic() > deadline:
                return beats
            time.sleep(0.5)

    return Restart()


def fatal_error(
    failures: Mapping[int, BaseException], failed_before: int = -1, *, is_restart: bool = False
) -> ScaleRayError | None:
    """The error that would come again: the user's slip, a loss that is not finite, the workload's own error where it
    came before, or before anything was done. failed_before: the furthest step in which it did; -1 is none."""
    for _, failure in sorted(failures.items()):
        error = _cause(failure)
        if isinstance(error, (UsageError, NonFiniteLossError, InitialisationError, InputStarvedError, LeftEarly)):
            return error
        if isinstance(error, StepFailedError) and (
            (error.steps_done == 0 and not is_restart) or 0 <= error.step <= failed_before
        ):
            return error
    return None


def _failed_step(failure: BaseException) -> int:
    error = _cause(failure)
    return error.step if isinstance(error, StepFailedError) else -1


def _wait_for_silence(recorder: RemoteRecorder, *, silent_s: float = 3.0, timeout_s: float = 60.0) -> None:
    """Workers of a controller that died must be gone before others write the same checkpoints."""
    deadline = time.monotonic() + timeout_s
    while recorder.silent_s() < silent_s and time.monotonic() < deadline:
        time.sleep(0.5)


def collective_backend(config: RunConfig) -> str:
    """The process group's backend, as torch writes it."""
    # gloo beside NCCL: collectives on CPU tensors need a backend of their own
    return "cpu:gloo,cuda:nccl" if config.scale.gpus_per_worker else "gloo"


def worker_resources(config: RunConfig) -> dict[str, float]:
    """What Ray reserves for each worker."""
    resources = {"CPU": config.scale.cpus_per_worker}
    return {**resources, "GPU": config.scale.gpus_per_worker} if config.scale.gpus_per_worker else resources


class _Watcher:
    """Polls the recorder while the driver waits for Ray, in a thread. error: why the recorder could not start."""

    def __init__(self, recorder: RemoteRecorder, show: Show) -> None:
        self.recorder, self.show = recorder, show
        self.error: ScaleRayError | None = None
        self.position = 0
        self.stop = threading.Event()
        self.can_interrupt = threading.current_thread() is threading.main_thread()

    def show_new(self) -> None:
        self.position, messages = self.recorder.poll(self.position)
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
            except ray.exceptions.RayActorError as exc:
                if self.stop.is_set():
                    return
                # nothing would be recorded any more, and no checkpoint come to exist
                self.error = RunFailedError(f"the recorder's process was lost: {_last_line(exc)}")
                if self.can_interrupt:
                    signal.raise_signal(signal.SIGINT)
                return
            except ray.exceptions.RayError:
                continue  # it did not answer in time


@contextlib.contextmanager
def _showing(recorder: RemoteRecorder, show: Show) -> Iterator[_Watcher]:
    """Hand the recorder's messages to `show` while the context lasts, and the rest at its end."""
    import ray

    watcher = _Watcher(recorder, show)
    thread = threading.Thread(target=watcher.watch, name="scaleray-show", daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher.stop.set()
        thread.join(timeout=10)
        with contextlib.suppress(ray.exceptions.RayError, ScaleRayError):
            recorder.drain()
            watcher.show_new()


@contextlib.contextmanager
def _stop_on_sigterm(recorder: RemoteRecorder, grace_s: float) -> Iterator[None]:
    """`ray job stop` sends SIGTERM and, three seconds later, SIGKILL: save, and leave, or end like Ctrl-C after `grace_s`.

    On a loaded machine three seconds may not be enough to free everything, so the recorder hears of it first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before_term, before_int = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    timers: list[threading.Timer] = []

    def tell() -> None:
        recorder.actor.mark_killed.remote()
        recorder.actor.request_stop.remote()

    def on_sigterm(signum: int, frame: Any) -> None:
        # in a thread: the main one may be inside Ray, holding what a remote call needs
        threading.Thread(target=tell, daemon=True).start()
        timers.append(threading.Timer(grace_s, signal.raise_signal, [signal.SIGINT]))
        timers[-1].daemon = True
        timers[-1].start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, before_term)
        signal.signal(signal.SIGINT, before_int)  # Ray leaves its own behind, which waits for a finished controller


def explain(exc: BaseException, heartbeats: Sequence[Heartbeat] = ()) -> ScaleRayError:
    """The one error a user should read, out of what several workers and Ray's layers reported."""
    failures: dict[int, BaseException] = dict(getattr(exc, "worker_failures", {}) or {})
    failure = getattr(exc, "controller_failure", None)
    known = [_cause(error) for _, error in sorted(failures.items())] + ([_cause(failure)] if failure else [])
    own = [error for error in known if isinstance(error, ScaleRayError) and not isinstance(error, PeerLostError)]
    for kind in (UsageError, RunFailedError):
        for error in own:
            if isinstance(error, kind):
                return error
    if failures:
        return RunFailedError(what_failed(failures, heartbeats))
    return RunFailedError(f"Ray could not run the training: {_last_line(failure or exc)}")


def what_failed(failures: Mapping[int, BaseException], heartbeats: Sequence[Heartbeat]) -> str:
    """The failure that explains the others, with rank, node, step, cause and the worker's own last lines."""
    # workers that lost their peer only echo that it is gone
    rank = min(failures, key=lambda r: (_is_echo(failures[r]), r))
    error = _cause(failures[rank])
    if _is_echo(error) and (missed := _silent(failures, heartbeats)) is not None:
        step = max(b.step for b in heartbeats) + 1  # the others wait for it there
        state = f"hangs or was lost in step {step}: no sign of life for {missed.silent_s:.0f} s"
        if missed.silent_s < SILENT_S:
            state = f"hangs: it has been in `{missed.phase}` of step {missed.step + 1} for {missed.since_s:.0f} s"
        return f"rank {missed.rank} on {missed.node} (process {missed.process}) {state}{_tail(missed)}"
    beat = next((b for b in heartbeats if b.rank == rank), None)
    if isinstance(error, ScaleRayError):
        return f"{error}{_tail(beat)}"
    if beat is None:
        return f"rank {rank} was lost: {_death(error)}"
    who = f"rank {rank} on {beat.node} (process {beat.process})"
    if beat.phase.startswith(HANG):
        return f"{who} hangs: {beat.phase.removeprefix(HANG)}{_tail(beat)}"
    return f"{who} was lost in step {beat.step + 1}, in `{beat.phase}`: {_death(error)}{_tail(beat)}"


def _death(error: BaseException) -> str:
    """Ray's words on a worker's end, without its guesses."""
    found = re.search(
        r"Worker exit type: (\w+) Worker exit detail: (.*?)\.?( Some common causes|$)", str(error), re.DOTALL
    )
    return f"its process ended ({found[1]}: {found[2]})" if found else _last_line(error)


def _silent(failures: Mapping[int, BaseException], heartbeats: Sequence[Heartbeat]) -> Heartbeat | None:
    """The worker that the failed ones miss: it says nothing any more, or has long been in a phase of its own."""
    others = [beat for beat in heartbeats if beat.rank not in failures]
    silent = [beat for beat in others if beat.silent_s >= SILENT_S]
    if silent:
        return max(silent, key=lambda beat: beat.silent_s)
    stuck = [beat for beat in others if beat.phase != "synchronise" and beat.since_s >= 2 * SILENT_S]
    return max(stuck, key=lambda beat: beat.since_s, default=None)


def _tail(beat: Heartbeat | None) -> str:
    return "".join(f"\n  | {line}" for line in (beat.tail[-5:] if beat else ()))


def _is_echo(error: BaseException) -> bool:
    return isinstance(_cause(error), PeerLostError) or "onnection closed" in str(error) or "Gloo" in str(error)


def _was_preempted(failure: BaseException) -> bool:
    """Whether a worker died with a node that had been announced to go."""
    return bool(getattr(getattr(failure, "health_check_failure", failure), "preempted", False))


def _cause(exc: BaseException) -> BaseException:
    """The scaleray error inside Ray's wrappers, or the exception itself."""
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "cause", None)
        if isinstance(current, ScaleRayError):
            # Ray makes errors that are both its own and the cause's class: take the plain one
            return inner if isinstance(inner, ScaleRayError) else current
        current = inner if isinstance(inner, BaseException) else current.__cause__
    return exc


def _last_line(exc: BaseException) -> str:
    lines = [line for line in str(exc).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__
