"""One run under Ray Train: the recorder beside the driver, the workers, and what their failures mean."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scaleray.config import RunConfig
from scaleray.data.sources import Source
from scaleray.errors import RunFailedError, ScaleRayError, UsageError
from scaleray.launch.cluster import input_cpus
from scaleray.records import WorkerMessage
from scaleray.tracking.recorder import RunDescription
from scaleray.training.job import Split, TrainJob

Show = Callable[[Sequence[WorkerMessage]], None]
POLL_S = 0.5
WAIT_FOR_WORKERS_S = 30.0  # of the recorder, before it makes the MLflow run all the same
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
    job: TrainJob,
    sources: dict[str, Source],
    recorder: RemoteRecorder,
    *,
    weights_path: str,
    storage_path: str,
    run_name: str,
    show: Show,
) -> None:
    """Run the job's workers to the end. Raises UsageError, RunFailedError or Interrupted."""
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from scaleray.training.worker import Assignment, train_worker

    config = job.config
    streamed = {name: source.dataset for name, source in sources.items() if Split.of(name, source).is_streamed}  # type: ignore[attr-defined]
    assignment = Assignment(
        job=job,
        sources={name: ray.put(source) for name, source in sources.items() if name not in streamed},
        recorder=recorder.actor,
        input_cpus=input_cpus(config),
        weights_path=weights_path,
    )
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"assignment": assignment},
        torch_config=TorchConfig(backend=_backend(config), timeout_s=int(config.scale.collective_timeout_s)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scale.workers,
            use_gpu=config.scale.gpus_per_worker > 0,
            resources_per_worker=_resources(config),
            placement_strategy=config.scale.placement,
            label_selector=dict(config.scale.label_selector) or None,
        ),
        run_config=ray.train.RunConfig(
            name=run_name,
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(
                max_failures=config.scale.max_failures, controller_failure_limit=CONTROLLER_FAILURE_LIMIT
            ),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
        datasets=streamed or None,
        dataset_config=ray.train.DataConfig(enable_shard_locality=True) if streamed else None,
    )
    with _showing(recorder, show) as watcher, _stop_on_sigterm(recorder):
        try:
            trainer.fit()
        except (KeyboardInterrupt, SystemExit) as exc:
            raise (watcher.error or Interrupted()) from exc
        # a controller that died is an actor error, which Ray does not count among training failures
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as exc:
            recorder.wait_started(0)  # if MLflow was the reason, that is what the user must read
            raise explain(exc) from exc


def _backend(config: RunConfig) -> str:
    # gloo beside NCCL: collectives on CPU tensors need a backend of their own
    return "cpu:gloo,cuda:nccl" if config.scale.gpus_per_worker else "gloo"


def _resources(config: RunConfig) -> dict[str, float]:
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
            except ray.exceptions.RayError:
                return  # the recorder's process is gone: the run itself will say why


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
def _stop_on_sigterm(recorder: RemoteRecorder) -> Iterator[None]:
    """`ray job stop` sends SIGTERM and, three seconds later, SIGKILL: treat it like Ctrl-C, which frees everything.

    On a loaded machine three seconds may not be enough for that, so the recorder hears of it first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before_term, before_int = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def on_sigterm(signum: int, frame: Any) -> None:
        # in a thread: the main one may be inside Ray, holding what a remote call needs
        threading.Thread(target=recorder.actor.mark_killed.remote, daemon=True).start()
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before_term)
        signal.signal(signal.SIGINT, before_int)  # Ray leaves its own behind, which waits for a finished controller


def explain(exc: BaseException) -> ScaleRayError:
    """The one error a user should read, out of what several workers and Ray's layers reported."""
    failures: dict[int, BaseException] = dict(getattr(exc, "worker_failures", {}) or {})
    own = [
        (rank, found) for rank, error in sorted(failures.items()) if isinstance(found := _cause(error), ScaleRayError)
    ]
    for kind in (UsageError, RunFailedError):
        for _, known in own:
            if isinstance(known, kind):
                return known
    if failures:
        # the first to die explains the others, whose connections it closed
        rank, error = min(
            failures.items(), key=lambda item: ("onnection closed" in str(item[1]) or "Gloo" in str(item[1]), item[0])
        )
        return RunFailedError(f"rank {rank} failed: {_last_line(error)}")
    return RunFailedError(
        f"Ray could not run the training: {_last_line(getattr(exc, 'controller_failure', None) or exc)}"
    )


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
