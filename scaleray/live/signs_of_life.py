"""State of the workers in a recorder, in addition to their records: heartbeats, activity, and requests to stop."""

import math
import time
from collections.abc import Collection
from dataclasses import replace

from scaleray.records.alert_record import Alert
from scaleray.records.phases import Phase
from scaleray.records.run_record import Heartbeat, WorkerMessage
from scaleray.records.worker_requests import ControlRequest

MOST_KEPT = 20_000
"""Maximum number of messages stored without a display, so that a long run does not fill the driver's memory."""


class ShownMessages:
    """The newest messages, numbered from 0."""

    def __init__(self) -> None:
        self._messages: list[WorkerMessage] = []
        self._first = 0

    def add(self, message: WorkerMessage) -> None:
        """Add a message; if there are too many, the older half is dropped."""
        self._messages.append(message)
        if len(self._messages) > MOST_KEPT:
            self._first += MOST_KEPT // 2
            del self._messages[: MOST_KEPT // 2]

    def after(self, number: int) -> tuple[int, list[WorkerMessage]]:
        """Stored messages starting at `number`, and the number of the next one."""
        shown = self._messages[max(0, number - self._first) :]
        return self._first + len(self._messages), shown


SILENT_S, SILENT_S_A_RANK = 10.0, 0.03
"""Seconds of silence after which a rank is lost, and seconds added per rank, since many ranks report less often."""

LINKS_EVERY_S = 600.0
"""Minimum seconds between two measurements of links, no matter how long they stay slow."""


class SignsOfLife:
    """Receives the heartbeats of all ranks and answers each with the requests to its worker."""

    def __init__(self) -> None:
        self._stop_requested = self._save_requested = self._links_requested = False
        self._links_asked_at = -math.inf
        self._stopped_by = ""
        self._heartbeats: dict[int, tuple[float, Heartbeat]] = {}
        self._beaten_at = time.monotonic()

    def beat(self, heartbeat: Heartbeat) -> ControlRequest:
        """Store a heartbeat and return the requests to its worker."""
        self._beaten_at = time.monotonic()
        self._heartbeats[heartbeat.rank] = self._beaten_at, heartbeat
        if self._stop_requested:
            return ControlRequest.LEAVE
        if heartbeat.rank == 0 and self._save_requested:  # the others follow it
            self._save_requested = False
            return ControlRequest.SAVE
        if heartbeat.rank == 0 and self._links_requested:
            self._links_requested = False
            return ControlRequest.LINKS
        return ControlRequest.NOTHING

    def heartbeats(self) -> list[Heartbeat]:
        """Last heartbeat of every rank."""
        now, known = time.monotonic(), dict(self._heartbeats)  # others of its threads add to it
        _, newest = max(known.values(), key=lambda pair: pair[0], default=(0.0, None))
        beats = [replace(beat, silent_s=now - at) for _, (at, beat) in sorted(known.items())]
        return [beat for beat in beats if newest and beat.rank < newest.world_size]  # others are of a larger group

    def silent_ranks(self, ended: Collection[int] = ()) -> frozenset[int]:
        """Ranks lost after too long a silence. ended: ranks that reported their end."""
        return frozenset(
            beat.rank
            for beat in self.heartbeats()
            if beat.silent_s > max(SILENT_S, SILENT_S_A_RANK * beat.world_size)
            and beat.phase != Phase.END
            and beat.rank not in ended
        )

    def silent_s(self) -> float:
        """Seconds since the last heartbeat of any worker."""
        return time.monotonic() - self._beaten_at

    def request_stop(self) -> None:
        """Request that the workers save and stop."""
        self._stop_requested = True

    def act_on(self, alert: Alert) -> None:
        """Request the action of an alert from the workers."""
        if alert.action == "stop":
            self._stopped_by = self._stopped_by or f"stopped by the {alert}"
            self.request_stop()
        elif alert.action == "checkpoint":
            self._save_requested = True

    def ask_for_links(self) -> None:
        """Request a measurement of the links between workers, unless one was requested recently."""
        now = time.monotonic()
        if now - self._links_asked_at >= LINKS_EVERY_S:
            self._links_requested, self._links_asked_at = True, now

    def stopped_by(self) -> str:
        """The alert that stopped the run, as text; empty if none did."""
        return self._stopped_by
