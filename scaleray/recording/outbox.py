"""Operations on their way to MLflow: they are sent in order, stored while MLflow rejects them, and retried."""

import json
import time
from typing import Generic, Protocol, TypeVar

FIRST_S, MOST_S = 2.0, 30.0


class Backoff:
    """Waiting times: FIRST_S seconds after the first failure, twice as long after each further one, at most MOST_S."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S

    def failed(self) -> float:
        """Return the seconds to wait after this failure."""
        wait_s, self._wait_s = self._wait_s, min(MOST_S, 2 * self._wait_s)
        return wait_s

    def reset(self) -> None:
        """Reset the waiting time, after an answer."""
        self._wait_s = FIRST_S


REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "PERMISSION_DENIED",
)

Op = TypeVar("Op")
Op_contra = TypeVar("Op_contra", contravariant=True)


class Destination(Protocol[Op_contra]):
    """A run in MLflow. `send` raises the server's errors."""

    def send(self, operation: Op_contra) -> None: ...


class Outbox(Generic[Op]):
    """Sends operations to `store`, and keeps rejected ones in memory.

    leaves_out_refused: drop operations that would be refused again, so that they do not block later ones. num_sent:
    number of accepted operations. sent_at: time of the last accepted one, on the monotonic clock. failure: reason for
    the last rejection, as text."""

    def __init__(self, store: Destination[Op] | None = None, *, leaves_out_refused: bool = False) -> None:
        self.store = store
        self.num_sent, self.sent_at = 0, 0.0
        self.failure = "no answer in time"
        self._leaves_out_refused = leaves_out_refused
        self._kept: list[Op] = []
        self._retry_at, self._backoff = 0.0, Backoff()

    @property
    def num_kept(self) -> int:
        """Number of operations that are waiting to be sent again."""
        return len(self._kept)

    def send(self, operation: Op) -> None:
        """Send an operation, or store it. While anything is stored, later operations queue behind it."""
        if self._kept and not self.send_kept():
            self._keep(operation)
        elif (problem := self._try(operation)) is not None:
            self._keep(operation)
            self._say_away(problem)
            self._wait_longer()

    def send_kept(self) -> bool:
        """Retry if it is time to. Returns whether all stored operations have been sent."""
        if not self._kept:
            return True
        if time.monotonic() < self._retry_at:
            return False
        for number, operation in enumerate(self._kept):
            if self._try(operation) is not None:  # still away: what was sent is forgotten, the rest stays
                self._forget(number)
                self._wait_longer()
                return False
        self._forget(len(self._kept))
        self._backoff.reset()
        self._say_back()
        return True

    def retry_now(self) -> None:
        """Retry the next operation now, even if it is not yet time to."""
        self._retry_at = 0.0

    def _try(self, operation: Op) -> Exception | None:
        """Send an operation. Returns the reason for a retry, or None if none is needed."""
        try:
            assert self.store is not None, "the run exists before anything is sent"
            self.store.send(operation)
        except Exception as exc:  # whatever MLflow raises, training goes on
            self.failure = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"[:300]
            return None if _is_refusal(exc) and self._set_aside(operation, exc) else exc
        self.num_sent += 1
        self.sent_at = time.monotonic()
        return None

    def _set_aside(self, operation: Op, refusal: Exception) -> bool:
        """Remove from the queue an operation that would be refused again. Returns False if it must stay."""
        return self._leaves_out_refused

    def _wait_longer(self) -> None:
        self._retry_at = time.monotonic() + self._backoff.failed()

    def _keep(self, operation: Op) -> None:
        self._kept.append(operation)

    def _forget(self, number: int) -> None:
        """Drop the first `number` operations."""
        del self._kept[:number]

    def _say_away(self, problem: Exception) -> None:
        """Log that the store no longer accepts anything."""

    def _say_back(self) -> None:
        """Log that the store has accepted all stored operations."""


def is_refusal_of_content(exc: Exception) -> bool:
    """Whether a server refused the content, rather than the sender or the run. A body that is not JSON, as from a proxy
    in between, does not come from MLflow."""
    if isinstance(exc, json.JSONDecodeError):
        return False
    return getattr(exc, "error_code", "") in REFUSALS[:2] or isinstance(exc, (FileNotFoundError, ValueError, TypeError))


def _is_refusal(exc: Exception) -> bool:
    """Whether the same operation would be refused again."""
    return getattr(exc, "error_code", "") in REFUSALS or is_refusal_of_content(exc)
