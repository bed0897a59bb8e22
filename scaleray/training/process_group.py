"""Process group that a worker forms with other workers."""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from scaleray.training.health import flight_recorder
from scaleray.training.health.stall_watch import GROUP_VARIABLE
from scaleray.training.setup.stores import StorePlace, is_loopback, open_store


def join_group(
    place: StorePlace,
    backend: str,
    timeout_s: float,
    *,
    name: str,
    node: str,
    device: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
) -> None:
    """Form a process group with other workers at a store, using the variables that torchrun sets. Collective. name:
    name of the group, for reports of hangs. node: address of this machine."""
    flight_recorder.switch_on()
    os.environ |= {
        GROUP_VARIABLE: name,
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "ACCELERATE_TORCH_DEVICE": device,
    }
    if (interface := interface_of(node)) is not None:
        # where a host's own name means 127.0.1.1, as Debian has it, gloo would give the others that address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if is_loopback(place.host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # else it listens on another one, if there is any
    if "nccl" in backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # collectives that time out fail
    # torch does not reset its number of groups, which is in their keys at the store, after a failed attempt
    _world.group_count = 0
    dist.init_process_group(
        backend,
        store=open_store(place, timeout=timedelta(seconds=timeout_s)),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface with this address; None if there is none."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(a.address == address for a in addresses)), None)
