"""The recorder as a Ray actor beside the driver, called like the plain object."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from scaleray.launch.worker_failures import cause_of
from scaleray.tracking.run_description import RunDescription

WAIT_FOR_WORKERS_S = 30.0  # of the recorder, before it makes the MLflow run all the same


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
                raise cause_of(exc) from exc

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
            raise cause_of(exc) from exc
        return True
