"""The recorder as a Ray actor next to the driver, called like the plain object."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import load_json
from scaleray.launch.workers.lost_workers import cause_of
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import Heartbeat, WorkerMessage

NAMESPACE, NAMES = "scaleray", "recorder-"
"""Ray namespace of recorders, and prefix of their names, by which `watch` finds them."""

SETTINGS = (
    "MLFLOW_", "DATABRICKS_", "AWS_", "AZURE_", "GOOGLE_", "PG", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
"""Prefixes of the variables that configure MLflow, its stores and their clients."""

if TYPE_CHECKING:
    from scaleray.records.run_description import Recording, RunIdentity


def spawn_recorder(description: RunDescription, *, publishes: bool = False) -> Any:
    """Start the recorder as an actor on the driver's node, where the SQLite file and the run's local folder are.
    publishes: whether Ray's nodes accept metrics."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from scaleray.recording.recorder import Recorder
    from scaleray.training.ray_metrics import RayMetrics

    class PoliteRecorder(Recorder):
        """Recorder that yields the cores to workers while they start and train."""

        def __init__(self, description: RunDescription) -> None:
            os.nice(19)  # the most there is: Linux gives 19 a seventh of the share of 10
            super().__init__(description)
            if publishes:
                self.publishing.publish = RayMetrics().publish

        def begin(self, environment: Mapping[str, str]) -> RunIdentity:
            """Start with the driver's settings for MLflow and its stores, which are unknown to a Ray that was already
            running.

                    They are passed as an argument, since Ray's dashboard shows the environment of an actor."""
            os.environ.update(environment)
            gc.disable()  # an eighth of the CPU time of MLflow's import and of opening its store
            try:
                import_mlflow()
                return self.start()
            finally:
                gc.freeze()  # what was imported stays, and later collections need not look at it
                gc.enable()

        def live_text(self) -> str:
            """The run's state as JSON, which any version can read."""
            return self.live().to_json()

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # several calls at once: workers' messages must not wait while the run is being made
    actor = ray.remote(PoliteRecorder).options(
        num_cpus=0,
        scheduling_strategy=here,
        max_concurrency=8,
        enable_task_events=False,  # for each call Ray's control store would keep a record, up to 100,000 of them
        namespace=NAMESPACE,
        # two runs may have one name, and a lost recorder's is taken for a moment
        name=f"{NAMES}{description.run_name}-{secrets.token_hex(4)}",
    )
    return actor.remote(description)


def _settings_of_mlflow() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.upper().startswith(SETTINGS)}


class RemoteRecorder:
    """The recorder actor, called like the plain object. publishes: whether Ray's nodes accept metrics."""

    def __init__(self, description: RunDescription, *, publishes: bool = False) -> None:
        self.description, self.publishes = description, publishes
        self._spawn(description)

    @property
    def published_as(self) -> tuple[str, str] | None:
        """Name and id of the run in the metrics of Ray's nodes; None if they publish none."""
        return (self.description.run_name, self.description.run_id) if self.publishes else None

    def _spawn(self, description: RunDescription) -> None:
        self.actor = spawn_recorder(description, publishes=self.publishes)
        # at once, beside the workers' start: after the first step MLflow's 2.5 CPU seconds would be taken from the
        # training, on 2 cores for 2 workers 13 % of its speed for 10 s
        self.started = self.actor.begin.remote(_settings_of_mlflow())

    def respawn(self) -> None:
        """Replace an actor that was lost. The new one continues the same MLflow run, which run.json names."""
        self.close()
        before = None
        with contextlib.suppress(OSError, ValueError):  # lost before it had begun
            before = load_json(Store(self.description.work_dir).read("run.json"))
        self._spawn(dataclasses.replace(self.description, continues=before))

    def is_lost(self) -> bool:
        """Whether the actor's process is permanently gone, rather than busy or briefly unreachable."""
        import ray

        try:
            ray.get(self.actor.silent_s.remote(), timeout=60)
        except ray.exceptions.ActorDiedError:
            return True
        except ray.exceptions.RayError:
            return False
        return False

    def _ask(self, answer: Any, *, timeout_s: float | None = 180.0) -> Any:
        """Return the actor's answer, or raise its error."""
        import ray

        try:
            return ray.get(answer, timeout=timeout_s)
        except ray.exceptions.RayTaskError as exc:
            raise cause_of(exc) from exc

    def log(self, messages: Sequence[WorkerMessage]) -> None:
        """See `Recorder.log`."""
        self._ask(self.actor.log.remote(messages))

    def poll(self, after: int) -> tuple[int, list[WorkerMessage | Heartbeat]]:
        """See `Recorder.poll`."""
        number, messages = self._ask(self.actor.poll.remote(after))
        return int(number), list(messages)

    def heartbeats(self) -> list[Heartbeat]:
        """See `Recorder.heartbeats`."""
        return list(self._ask(self.actor.heartbeats.remote()))

    def silent_s(self) -> float:
        """See `Recorder.silent_s`."""
        return float(self._ask(self.actor.silent_s.remote()))

    def stopped_by(self) -> str:
        """See `Recorder.stopped_by`."""
        return str(self._ask(self.actor.stopped_by.remote()))

    def identity(self) -> RunIdentity:
        """See `Recorder.identity`."""
        identity: RunIdentity = self._ask(self.actor.identity.remote())
        return identity

    def log_files(self, paths: Sequence[str], folder: str | None = None) -> None:
        """See `Recorder.log_files`."""
        self._ask(self.actor.log_files.remote(paths, folder))

    # what is written to MLflow at the end may take long; the recorder itself gives up what hangs

    def drain(self) -> Recording:
        """See `Recorder.drain`."""
        recording: Recording = self._ask(self.actor.drain.remote(), timeout_s=None)
        return recording

    def finish(
        self, status: str, *, metrics: Mapping[str, float], tags: Mapping[str, str], files: Mapping[str, str]
    ) -> str | None:
        """See `Recorder.finish`."""
        unsent: str | None = self._ask(
            self.actor.finish.remote(status, metrics=metrics, tags=tags, files=files), timeout_s=None
        )
        return unsent

    def close(self) -> None:
        """End the actor, even if others hold a handle to it. Call it after the actor's last write."""
        import ray

        with contextlib.suppress(Exception):  # it may be gone already
            ray.kill(self.actor)

    def wait_started(self, timeout_s: float | None = None) -> bool:
        """Wait for the MLflow run. Returns False on timeout; re-raises the start-up error."""
        import ray

        try:
            ray.get(self.started, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayTaskError as exc:
            raise cause_of(exc) from exc
        return True


UNUSED = ("pandas", "scipy", "pyarrow")

"""Libraries for data sets and models, which MLflow imports if they are installed but does not need here."""


def import_mlflow() -> None:
    """Import MLflow as if `UNUSED` were not installed, in a process that runs no user code: 0.8 instead of 1.2 CPU
    seconds, and 155 instead of 232 MiB with the store.

    `mlflow.data` then lacks `from_pandas`, so only the recorder calls this, in its own process. Other threads must not
    import meanwhile. If MLflow's version needs these libraries, the next import imports it in full."""
    hidden = {name: None for name in UNUSED if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type] # None says that there is no such module
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("mlflow")
    finally:
        for name in hidden:
            del sys.modules[name]
