"""Progress of a study or a sweep, in live.json of its folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scaleray.common.progress import Stage
from scaleray.live.live_run import LiveFile
from scaleray.records.live_state import RUNNING, LiveState


@contextlib.contextmanager
def written_while(
    stage: Callable[[], Stage], folder: Path, *, kind: str, name: str, run_id: str, started_at: float
) -> Iterator[None]:
    """Context during which the file has a stage's progress. An error leaves the status in the file; after success, the
    record has it. stage: returns the current progress. started_at: wall clock."""
    status = RUNNING

    def state() -> LiveState:
        now = stage()
        return LiveState(
            name=name,
            kind=kind,
            status=status,
            run_id=run_id,
            run_dir=str(folder),
            started_at=started_at,
            seen_at=time.time(),
            done=now.done,
            total=now.total,
            unit=now.unit,
            left_s=now.left_s if status == RUNNING else None,
        )

    file = LiveFile(folder, state)
    file.start()
    try:
        yield
    except BaseException as exc:
        status = "KILLED" if isinstance(exc, KeyboardInterrupt) else "FAILED"
        raise
    finally:
        file.end()
