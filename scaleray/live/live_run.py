"""Live state of a run, written to live.json every two seconds.

The watch page reads only this file, as a long run's `steps.csv` is too large to read repeatedly."""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time as wall_clock

from scaleray.common.filesystems import write_whole
from scaleray.live.state.run_state import RunState
from scaleray.records.alert_record import ALERTS_FILE, Alert, parse_alerts
from scaleray.records.live_state import FILE, LiveState, RankNow, late_s
from scaleray.records.phases import Phase
from scaleray.records.run_description import RunDescription, RunIdentity
from scaleray.records.run_record import Heartbeat


def alerts_in(folder: Path) -> list[Alert]:
    """Newest state of each alert, in the order in which the alerts first fired."""
    text = ""
    with contextlib.suppress(OSError):
        text = (folder / ALERTS_FILE).read_text(errors="replace")
    return list({alert.name: alert for alert in parse_alerts(text)}.values())


WRITE_EVERY_S = 2.0


def live_state(
    description: RunDescription,
    state: RunState,
    *,
    identity: RunIdentity | None = None,
    beats: Sequence[Heartbeat] = (),
    waiting: int = 0,
) -> LiveState:
    """Current state. identity: the run in MLflow, once it exists. beats: last heartbeat of each rank. waiting: number
    of points that MLflow has not accepted."""
    d = description
    return state.live_state(
        name=d.run_name,
        total_steps=d.total_steps,
        config=d.config,
        ranks=ranks_of(beats),
        run_id=identity.run_id if identity is not None else "",
        mlflow_link=identity.link if identity is not None else "",
        run_dir=d.run_path or d.work_dir,
        strategy=d.strategy,
        started_at=d.started_at,
        seen_at=wall_clock(),
        expected_samples_per_s=d.published.expected_samples_per_s,
        phases=mean_phases(beats),
        alerts=alerts_in(Path(d.work_dir)),
        waiting_points=waiting,
    )


class LiveFile:
    """Writes a run's state to its local folder, in a separate thread because MLflow may block the recorder's."""

    def __init__(self, folder: Path, state: Callable[[], LiveState]) -> None:
        self._path, self._state = folder / FILE, state
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_now_and_then, name="scaleray-live", daemon=True)

        self._before: bytes | None = None

    def start(self) -> None:
        """Write the file now, and then periodically."""
        with contextlib.suppress(OSError):
            self._before = self._path.read_bytes()
        self.write()
        self._thread.start()

    def put_back(self) -> None:
        """Restore the file that existed before `start`, as the run did not continue."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._path.write_bytes(self._before)

    def end(self) -> None:
        """Write the file one last time."""
        self._stop.set()
        self.write()

    def write(self) -> None:
        """Replace the file with the newest state; do nothing if the disk is full."""
        with self._lock, contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(self._state().to_dict()))

    def _write_now_and_then(self) -> None:
        while not self._stop.wait(WRITE_EVERY_S):
            self.write()


def ranks_of(beats: Sequence[Heartbeat]) -> list[RankNow]:
    """Activity and lateness at collectives of each rank."""
    waits = {beat.rank: beat.recent.phases.get(Phase.COMMUNICATION, 0.0) for beat in beats if beat.recent is not None}
    late = dict(zip(waits, late_s(list(waits.values())), strict=True)) if len(waits) > 1 and any(waits.values()) else {}
    return [
        RankNow(
            rank=beat.rank,
            node=beat.node,
            step=beat.step,
            phase=beat.phase,
            since_s=beat.since_s,
            silent_s=beat.silent_s,
            step_time_s=beat.recent.step_s if beat.recent is not None else None,
            late_s=late.get(beat.rank),
            memory=dict(beat.recent.memory) if beat.recent is not None else {},
        )
        for beat in beats
    ]


def mean_phases(beats: Sequence[Heartbeat]) -> dict[str, float]:
    """Seconds of each part of a step, averaged over the ranks."""
    known = [beat.recent.phases for beat in beats if beat.recent is not None]
    names = dict.fromkeys(name for phases in known for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in known) / len(known) for name in names}
