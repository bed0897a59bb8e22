"""The workers' process group, set up for Ray Train by a controller that never imports torch.

`ray.train.torch.TorchConfig` does the same, but imports torch in the controller, which only passes addresses on. That
import takes more than a second of CPU time before the first worker starts.
"""

import time
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from scaleray.training.setup.stores import OwnedStore, StorePlace

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that workers have to leave their group; a stopped or hanging worker never does."""


_owned: OwnedStore | None = None
"""Rendezvous store of this process's group, if this process has rank 0."""


class ProcessGroup(BackendConfig):
    """A `torch.distributed` process group over all workers, as `torch_config` of a TorchTrainer.

    backend: its name in torch. timeout_s: seconds that a collective may take. are_replaced: whether workers are
    replaced one by one and form their groups themselves.
    """

    def __init__(self, backend: str, timeout_s: int, *, are_replaced: bool = False) -> None:
        self.backend, self.timeout_s, self.are_replaced = backend, timeout_s, are_replaced

    @property
    def backend_cls(self) -> type[Backend]:
        """Class whose methods the controller calls."""
        return _ReplacedWorkers if self.are_replaced else _ProcessGroupBackend

    def to_dict(self) -> dict[str, Any]:
        """Facts for Ray's own record of the run."""
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class _ProcessGroupBackend(Backend):
    share_cuda_visible_devices = True  # workers of one node see each other's GPUs, as peer-to-peer copies need

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Connect the workers into one group through the address of rank 0."""
        place = worker_group.execute_single(0, _own_store)
        started_at = time.strftime("%Y%m%d-%H%M%S")
        worker_group.execute(_join, place, backend_config.backend, backend_config.timeout_s, started_at)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Make the workers leave their group, if they still answer."""
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=SHUTDOWN_TIMEOUT_S)


class _ReplacedWorkers(Backend):
    share_cuda_visible_devices = True
    has_replica_groups = True  # the controller replaces lost workers and leaves the others alone


def _own_store() -> StorePlace:
    """Store through which the workers find each other, held by this worker until it ends."""
    global _owned
    _owned = OwnedStore(ray.util.get_node_ip_address())
    return _owned.place


def _join(place: StorePlace, backend: str, timeout_s: int, started_at: str) -> None:
    """Make this worker a member."""
    import ray.train
    from ray.train.torch import get_device

    from scaleray.training.process_group import join_group

    own = ray.train.get_context()
    join_group(
        place,
        backend,
        timeout_s,
        name=started_at,
        node=ray.util.get_node_ip_address(),
        device=str(get_device()),
        rank=own.get_world_rank(),
        world_size=own.get_world_size(),
        local_rank=own.get_local_rank(),
        local_world_size=own.get_local_world_size(),
        node_rank=own.get_node_rank(),
    )


def _leave() -> None:
    """Leave the group, and release memory held by the GPU's allocator."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if _owned is not None:
        _owned.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
