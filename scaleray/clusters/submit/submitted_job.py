"""A job on any type of cluster, followed until it ends."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scaleray.config.alerts import without_secrets_in
from scaleray.errors import ClusterError

ENDED = ("SUCCEEDED", "FAILED", "STOPPED", "UNKNOWN")
GIVE_UP_S = 1800.0
"""Seconds after which attempts to reconnect end; the job continues."""
POLL_S = 3.0
TRY_AGAIN_S = 2.0


class LostConnectionError(ClusterError):
    """The cluster is temporarily unreachable; the job keeps running."""


@dataclass(frozen=True)
class JobNow:
    """State of a job, as reported by the cluster."""

    name: str
    status: str
    message: str = ""
    entrypoint: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None

    def __post_init__(self) -> None:
        # the job may have been submitted with a secret in its command
        object.__setattr__(self, "entrypoint", without_secrets_in(self.entrypoint))

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in ENDED


class ClusterJobs(Protocol):
    """Jobs of one cluster. Every method raises ClusterError."""

    @property
    def place(self) -> str:
        """Value of `--to`, or an equivalent one for the same cluster."""

    def job(self, name: str) -> JobNow:
        """State of a job on the cluster."""

    def list(self) -> list[JobNow]:
        """All submitted jobs, newest first."""

    def logs(self, name: str) -> str:
        """Output of a job so far."""

    def stop(self, name: str) -> None:
        """Stop a job."""

    def follow(self, name: str, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Write a job's output until it ends. Lost connections are retried, and nothing is written twice. say: receives
        messages about them."""


def follow_by_polling(
    place: str, look: Callable[[], JobNow], write_new: Callable[[], None], say: Callable[[str], None]
) -> JobNow:
    """Poll a job, and write its new output until it ends. say: receives messages about lost connections and about why a
    job waits."""
    lost_at: float | None = None
    said = ""
    while True:
        try:
            job = look()  # before reading the output, which then includes its last lines
            write_new()
        except LostConnectionError:
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
                say(f"the connection to {place} was lost; the job continues; reconnecting ...")
            if now - lost_at > GIVE_UP_S:
                raise
            time.sleep(TRY_AGAIN_S)
            continue
        lost_at = None
        if job.has_ended:
            return job
        if job.message and job.message != said:
            said = job.message
            say(f"{job.status.lower()}: {said}")
        time.sleep(POLL_S)
