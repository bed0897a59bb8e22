"""Ray's TorchTrainer without the helpers that a run here does not use: the one place that overrides private methods of
Ray Train.

Measured on 2 cores, CPU seconds before the first step: PlacementGroupCleaner 1.4, DatasetManager 1.3, the autoscaling
coordinator 1.2, torch in the controller 1.2. Each of the first three is a process of its own, and workers start after
the last two. The controller imports this module, which therefore imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

from scaleray.launch.cluster import connection

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

CLEANER = "PlacementGroupCleanerCallback"
"""Callback that removes the placement group of a controller that died; `run/trainer.py` does so for a run, and the end
of the driver for all others."""
DATASETS = "DatasetsCallback"
"""Callback that deals out Ray Datasets, and starts a process for it even where there are none."""


def lean_trainer(worker: Any, *, datasets: dict[str, Any] | None, **arguments: Any) -> TorchTrainer:
    """A TorchTrainer that leaves out what this run does not use, or a plain one where Ray Train is made otherwise."""
    from ray.train.torch import TorchTrainer

    class LeanTrainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            unused = {CLEANER} if self.datasets else {CLEANER, DATASETS}
            return [c for c in super()._create_default_callbacks() if type(c).__name__ not in unused]

        def _initialize_and_run_controller(self, *, scaling_policy: Any, **arguments: Any) -> Any:
            # a Ray of our own has no autoscaler, and no other run to share with; with Ray Datasets their executor asks
            if type(scaling_policy) is FixedScalingPolicy and connection.is_own() and not self.datasets:
                scaling_policy = WithoutAutoscaler(scaling_policy.scaling_config)
            return super()._initialize_and_run_controller(scaling_policy=scaling_policy, **arguments)

    overridden = ("_create_default_callbacks", "_initialize_and_run_controller")
    is_as_known = all(hasattr(TorchTrainer, name) for name in overridden)
    return (LeanTrainer if is_as_known else TorchTrainer)(worker, datasets=datasets, **arguments)


class WithoutAutoscaler(FixedScalingPolicy):
    """A fixed number of workers on nodes that are there, so that nobody is asked for more."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ask nobody."""

    def _send_resource_request(self) -> None:
        """Ask nobody."""

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request
