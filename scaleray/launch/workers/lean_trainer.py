"""Ray's TorchTrainer without the helper processes that runs here do not use. Overrides private methods of Ray Train,
see `scaleray/common/private_parts.py`; imported only if that part is used.

Measured on 2 cores, CPU seconds before the first step: PlacementGroupCleaner 1.4, DatasetManager 1.3, the autoscaling
coordinator 1.2, torch in the controller 1.2. The first three are separate processes, and workers wait for the last two.
The controller imports this module, which therefore does not import torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import ray
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api import data_parallel_trainer

from scaleray.launch.cluster import connection

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

CLEANER = "PlacementGroupCleanerCallback"
"""Callback that removes a dead controller's placement group; `run/trainer.py` does so for a run, and the driver's end
for all else."""
DATASETS = "DatasetsCallback"
"""Callback that distributes Ray Datasets, and starts a process for this even if there are none."""


def lean_trainer(worker: Any, *, datasets: dict[str, Any] | None, **arguments: Any) -> TorchTrainer:
    """A TorchTrainer without the parts that this run does not use."""
    from ray.train.torch import TorchTrainer

    are_replaced = getattr(arguments.get("torch_config"), "are_replaced", False)

    class LeanTrainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            unused = {CLEANER} if self.datasets else {CLEANER, DATASETS}
            return [c for c in super()._create_default_callbacks() if type(c).__name__ not in unused]

        def _initialize_and_run_controller(self, *, scaling_policy: Any, **arguments: Any) -> Any:
            if not connection.workers_inherit():
                own = PatientController if are_replaced else controller.TrainController
                with mock.patch.object(data_parallel_trainer, "TrainController", own):
                    return super()._initialize_and_run_controller(scaling_policy=scaling_policy, **arguments)
            # a Ray of our own has no autoscaler, and no other run to share with; with Ray Datasets their executor asks
            if connection.is_own() and type(scaling_policy) is FixedScalingPolicy and not self.datasets:
                scaling_policy = WithoutAutoscaler(scaling_policy.scaling_config)
            actor = ray.remote(num_cpus=0)(TrainController).remote(scaling_policy=scaling_policy, **arguments)
            if threading.current_thread() is threading.main_thread():
                self._register_sigint_handler(actor)
            ray.get(actor.run.remote())
            return ray.get(actor.get_result.remote())

    return LeanTrainer(worker, datasets=datasets, **arguments)


class InheritingWorkers(WorkerGroup):
    """Workers that inherit the environment of their node or job; setting one for each would cost a process."""

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> dict[str, Any]:
        return dict(custom_runtime_env)


class PatientController(controller.TrainController):
    """Controller that replaces a lost worker once there is a node for it. Ray's own waits for that node, and meanwhile
    sees neither other losses nor the end of the training."""

    def _is_training_succeeded(self, poll_status: Any) -> bool:
        # workers that can be replaced return once the training is over, for which a lost one is not needed any more
        statuses = poll_status.worker_statuses.values()
        present = [e for e in statuses if e.error is None or isinstance(e.error, UserExceptionWithTraceback)]
        has_returned = [not each.running and each.error is None for each in present]
        is_over = self._manages_replica_groups and bool(present) and all(has_returned)
        return bool(is_over or super()._is_training_succeeded(poll_status))

    def _replace_bad_workers(self, poll_status: Any) -> None:
        workers = self._worker_group._worker_group_state.placement_group_handle.placement_group
        if ray.util.placement_group_table(workers)["state"] == "CREATED":
            super()._replace_bad_workers(poll_status)


class TrainController(PatientController):
    """Controller of workers that inherit their environment."""

    worker_group_cls = InheritingWorkers


class WithoutAutoscaler(FixedScalingPolicy):
    """Scaling policy with a fixed number of workers on existing nodes, which requests no further nodes."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Request nothing."""

    def _send_resource_request(self) -> None:
        """Request nothing."""

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request
