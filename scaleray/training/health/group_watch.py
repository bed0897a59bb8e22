"""The watch on a group of processes that runs one training after another: verify, studies, check, short profiles.

Each training has a `Progress` of its own, made deep inside of what the group does; the watch hears of it there, and
looks at the newest one, as `StallWatch` does for a worker that has a single training.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from scaleray.training.health import progress as progress_of_process
from scaleray.training.health.progress import Progress
from scaleray.training.health.stall_watch import StallWatch
from scaleray.training.setup.place import Place
from scaleray.watchers import Guard

LOOK_EVERY_S = 0.5


class GroupWatch:
    """Context in which the trainings of this process are watched. run_path: the folder that gets `hangs/`. group: name
    of this group of processes, the same on all of them and no other's in that folder."""

    def __init__(
        self,
        place: Place,
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
        """Watch a training that begins, and no longer the one before."""
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
