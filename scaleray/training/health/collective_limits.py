"""How long a collective may take before it counts as lost: longer while the first step compiles than in all others.

Groups are made with a limit, which NCCL and gloo let change between collectives. Those of a device mesh know no other
than torch's default, of 10 minutes (NCCL) or half an hour (gloo), until they are given one here.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from scaleray.strategies.apart.in_flight_exchanges import BESIDE_TRAINING
from scaleray.training.health.progress import WATCHDOG_SHARE, Progress


class CollectiveLimits:
    """Limits on a worker's waiting for the others, of which each may compile and fill caches in its first step."""

    def __init__(self, progress: Progress, collective_timeout_s: float) -> None:
        self.progress, self.collective_timeout_s = progress, collective_timeout_s

    def apply(self) -> None:
        """Limit collectives that begin from now on, in every group of this process but those for exchanges that are
        under way for several steps. Not collective; each rank does it at the same place."""
        if not dist.is_initialized():
            return
        limit = timedelta(seconds=self._limit_s())
        for group in list(_world.pg_map):
            if dist.get_rank(group) >= 0 and group.group_desc != BESIDE_TRAINING:
                _set_pg_timeout(limit, group)

    def others_wait_s(self, world_size: int) -> float:
        """Seconds that a worker may wait for its input at the moment: less long than the others wait for it, so that
        it is the one that says why."""
        return WATCHDOG_SHARE * self._limit_s() if world_size > 1 else math.inf

    def _limit_s(self) -> float:
        return self.progress.others_wait_s(self.collective_timeout_s)
