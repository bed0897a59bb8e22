"""Watch on a group of processes that runs one training after another: verify, studies, check, short profiles.

Each training makes its own `Progress`, deep inside the group's code. The watch is notified of it and checks the newest
one, as `StallWatch` does for a worker with a single training."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from scaleray.common.watchers import Guard
from scaleray.strategies.apart.in_flight_exchanges import BESIDE_TRAINING
from scaleray.training.health import worker_progress as progress_of_process
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.health.worker_progress import WATCHDOG_SHARE, Progress
from scaleray.training.setup.rank_context import RankContext

# How long a collective may take before it counts as lost: longer while the first step compiles than in all others.
#
# Groups are made with a limit, which NCCL and gloo let change between collectives. Those of a device mesh know no
# other than torch's default, of 10 minutes (NCCL) or half an hour (gloo), until they are given one here.


class CollectiveLimits:
    """Time limits for waiting for other workers, which may compile and fill caches in their first step."""

    def __init__(self, progress: Progress, collective_timeout_s: float) -> None:
        self.progress, self.collective_timeout_s = progress, collective_timeout_s

    def apply(self) -> None:
        """Limit all later collectives of this process, except those of exchanges that last several steps. Not
        collective, but each rank must call it at the same point."""
        if not dist.is_initialized():
            return
        limit = timedelta(seconds=self._limit_s())
        for group in list(_world.pg_map):
            if dist.get_rank(group) >= 0 and group.group_desc != BESIDE_TRAINING:
                _set_pg_timeout(limit, group)

    def others_wait_s(self, world_size: int) -> float:
        """Seconds that a worker may currently wait for its input: less than the others wait for it, so that it is the
        first to report the cause."""
        return WATCHDOG_SHARE * self._limit_s() if world_size > 1 else math.inf

    def _limit_s(self) -> float:
        return self.progress.others_wait_s(self.collective_timeout_s)


LOOK_EVERY_S = 0.5


class GroupWatch:
    """Context in which the trainings of this process are watched. run_path: folder in which `hangs/` is created. group:
    name of this group of processes, the same on all of them and unique in that folder."""

    def __init__(
        self,
        place: RankContext,
        run_path: str,
        group: str,
        *,
        collective_timeout_s: float,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self.place, self.run_path, self.group = place, run_path, group
        self.collective_timeout_s, self.look_every_s = collective_timeout_s, look_every_s
        self._began_ns = time.time_ns()
        self._stalls: StallWatch | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()

    def __enter__(self) -> GroupWatch:
        progress_of_process.on_new = self._take
        threading.Thread(target=self._look, name="scaleray-stalls", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        progress_of_process.on_new = None
        self._stop.set()
        self._leave(kind, error, tb)

    def _take(self, progress: Progress) -> None:
        """Watch a new training instead of the previous one."""
        self._leave(None, None, None)
        stalls = StallWatch(
            progress,
            self.place,
            self.run_path,
            collective_timeout_s=self.collective_timeout_s,
            look_every_s=self.look_every_s,
            guard=Guard(lambda text: None),
            group=self.group,
            since_ns=self._began_ns,
        )
        stalls.__enter__()
        with self._lock:
            self._stalls = stalls

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            stalls, self._stalls = self._stalls, None
        if stalls is not None:
            stalls.__exit__(kind, error, tb)

    def _look(self) -> None:
        while not self._stop.wait(self.look_every_s):
            with self._lock:
                if self._stalls is not None:
                    self._stalls.look(time.monotonic() - self._stalls.progress.since, True)
