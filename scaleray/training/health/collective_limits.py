"""How long a collective may take before it counts as lost: longer while the first step compiles than in all others.

Groups are made with a limit, which NCCL and gloo let change between collectives. Those of a device mesh know no other
than torch's default, of 10 minutes (NCCL) or half an hour (gloo), until they are given one here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from scaleray.data import Part, StepStream
from scaleray.strategies.apart.in_flight_exchanges import BESIDE_TRAINING
from scaleray.training.health.progress import WATCHDOG_SHARE
from scaleray.training.setup.job import OpenStream, Split
from scaleray.training.setup.place import Place


def limit_collectives(limit_s: float) -> None:
    """Let collectives that begin from now on take `limit_s`, in every group of this process but those for exchanges
    that are under way for several steps. Not collective; each rank does it at the same place."""
    if not dist.is_initialized():
        return
    for group in list(_world.pg_map):
        if dist.get_rank(group) >= 0 and group.group_desc != BESIDE_TRAINING:
            _set_pg_timeout(timedelta(seconds=limit_s), group)


def in_time(open_stream: OpenStream, place: Place, others_wait_s: Callable[[], float]) -> OpenStream:
    """Streams on which a worker waits less long than the others wait for it, so that it is the one that says why.

    others_wait_s: gives how long they wait now, in seconds.
    """

    def open_in_time(split: Split, part: Part) -> StepStream:
        stream = open_stream(split, part)
        if place.world_size > 1:
            stream.others_wait_s = lambda: WATCHDOG_SHARE * others_wait_s()
        return stream

    return open_in_time
