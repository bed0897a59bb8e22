"""The coordinator of recoveries, as a Ray actor on the driver's node, separate from all workers."""

from __future__ import annotations

import secrets
from typing import Any

from scaleray.config import RunConfig
from scaleray.records.run_record import EventRecord
from scaleray.training.setup.stores import StorePlace


def spawn_coordinator(config: RunConfig, recorder: Any) -> Any:
    """Start the actor. recorder: actor that records each loss. If the coordinator's process is lost, the training
    continues without it, and Ray starts another one for restarted workers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class RecoveryCoordinator:
        def __init__(self) -> None:
            from scaleray.training.recovery.coordinator import Coordinator

            self.token = secrets.token_urlsafe(32)
            self._actors: dict[int, Any] = {}
            self._coordinator = Coordinator(
                ray.util.get_node_ip_address(),
                config.scale.max_workers,
                token=self.token,
                silent_s=config.recovery.silent_s,
                shrinks=config.recovery.on_loss == "shrink",
                end=lambda number, node, pid: ray.kill(self._actors[number]),
                say=lambda text: recorder.log.remote([EventRecord(text, kind="warning")]),
            )

        def admit(self, number: int, actor: Any) -> tuple[StorePlace, str]:
            """The address and the secret for a worker, which is this actor."""
            self._actors[number] = actor
            return self._coordinator.place, self.token

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(RecoveryCoordinator).options(num_cpus=0, scheduling_strategy=here, max_restarts=-1).remote()
