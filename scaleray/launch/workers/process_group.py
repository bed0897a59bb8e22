"""The workers' process group, set up for Ray Train by a controller that never imports torch.

`ray.train.torch.TorchConfig` does the same, but brings torch into the controller, which only passes addresses on: more
than a second of a core before the first worker starts.
"""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from scaleray.training.setup.stores import OwnedStore, StorePlace, is_loopback, open_store

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that workers get to leave their group: a stopped or hanging one does not take part."""


_owned: OwnedStore | None = None
"""Store at which this process's group meets, if this process has rank 0."""


class ProcessGroup(BackendConfig):
    """A `torch.distributed` process group over all workers, as `torch_config` of a TorchTrainer.

    backend: as torch writes it. timeout_s: seconds that a collective may take.
    """

    def __init__(self, backend: str, timeout_s: int) -> None:
        self.backend, self.timeout_s = backend, timeout_s

    @property
    def backend_cls(self) -> type[Backend]:
        """Methods that the controller calls."""
        return _ProcessGroupBackend

    def to_dict(self) -> dict[str, Any]:
        """Facts for Ray's own record of the run."""
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class _ProcessGroupBackend(Backend):
    share_cuda_visible_devices = True  # workers of one node see each other's GPUs, as peer-to-peer copies need

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Connect the workers into one group, by the address of rank 0."""
        place = worker_group.execute_single(0, _own_store)
        started_at = time.strftime("%Y%m%d-%H%M%S")
        worker_group.execute(_join, place, backend_config.backend, backend_config.timeout_s, started_at)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Let the workers leave their group, if they still answer."""
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=SHUTDOWN_TIMEOUT_S)


def _own_store() -> StorePlace:
    """Store through which the workers find each other, held by this worker until it ends."""
    global _owned
    _owned = OwnedStore(ray.util.get_node_ip_address())
    return _owned.place


def _join(place: StorePlace, backend: str, timeout_s: int, started_at: str) -> None:
    """Make this worker a member, under the variables that torchrun sets."""
    from datetime import timedelta

    import ray.train
    import torch.distributed as dist
    from ray.train.torch import get_device

    from scaleray.training.health import flight_recorder
    from scaleray.training.health.stall_watch import GROUP_VARIABLE

    context = ray.train.get_context()
    flight_recorder.switch_on()
    os.environ |= {
        GROUP_VARIABLE: started_at,
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "ACCELERATE_TORCH_DEVICE": str(get_device()),
    }
    if (interface := interface_of(ray.util.get_node_ip_address())) is not None:
        # where a host's own name means 127.0.1.1, as Debian has it, gloo would tell the others that address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if is_loopback(place.host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # else it listens on another one, if there is any
    if "nccl" in backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # collectives that time out fail
    dist.init_process_group(
        backend,
        store=open_store(place, timeout=timedelta(seconds=timeout_s)),
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        timeout=timedelta(seconds=timeout_s),
    )


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface with the address; None if none has it."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(a.address == address for a in addresses)), None)


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
