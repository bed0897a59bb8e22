"""How long a collective may take before it counts as lost: longer while the first step compiles than in all others.

Groups are made with a limit, which NCCL and gloo let change between collectives. Those of a device mesh know no other
than torch's default, of 10 minutes (NCCL) or half an hour (gloo), until they are given one here.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from scaleray.strategies.exchanges import BESIDE_TRAINING


def limit_collectives(limit_s: float) -> None:
    """Collectives that begin from now on may take `limit_s`, in every group of this process but those for exchanges that
    are under way for several steps. Not collective; each rank does it at the same place."""
    if not dist.is_initialized():
        return
    for group in list(_world.pg_map):
        if dist.get_rank(group) >= 0 and group.group_desc != BESIDE_TRAINING:
            _set_pg_timeout(timedelta(seconds=limit_s), group)
