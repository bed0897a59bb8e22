"""Operations on their way to MLflow: sent in order, kept for as long as it takes none, and tried again."""

from __future__ import annotations

import json
import time
from typing import Generic, Protocol, TypeVar

FIRST_S, MOST_S = 2.0, 30.0


class Backoff:
    """Seconds to wait: FIRST_S after the first failure, twice as long after each further one, at most MOST_S."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S

    def failed(self) -> float:
        """Seconds to wait after this failure."""
        wait_s, self._wait_s = self._wait_s, min(MOST_S, 2 * self._wait_s)
        return wait_s

    def reset(self) -> None:
        """Forget the failures: it has answered."""
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
    """A run in MLflow. `send` raises what the server raises."""

    def send(self, operation: Op_contra) -> None: ...


class Outbox(Generic[Op]):
    """Sends operations to `store`, and keeps in memory what it does not take.

    leaves_out_refused: what would be refused again is not kept, so that it does not hold back all that follow.
    num_sent: number of operations that were taken. sent_at: when the last one was, on the monotonic clock. failure: why
    the last one that was not taken was not, in words.
    """

    def __init__(self, store: Destination[Op] | None = None, *, leaves_out_refused: bool = False) -> None:
        self.store = store
        self.num_sent, self.sent_at = 0, 0.0
        self.failure = "no answer in time"
        self._leaves_out_refused = leaves_out_refused
        self._kept: list[Op] = []
        self._retry_at, self._backoff = 0.0, Backoff()

    @property
    def num_kept(self) -> int:
        """Number of operations that wait to be sent again."""
        return len(self._kept)

    def send(self, operation: Op) -> None:
        """Send, or keep; while anything is kept, later operations queue behind it."""
        if self._kept and not self.send_kept():
            self._keep(operation)
        elif (problem := self._try(operation)) is not None:
            self._keep(operation)
            self._say_away(problem)
            self._wait_longer()

    def send_kept(self) -> bool:
        """Try again, if it is time to; true when nothing is kept any more."""
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
        """Try with the next operation, whenever the next time would have been."""
        self._retry_at = 0.0

    def _try(self, operation: Op) -> Exception | None:
        """Send; gives why it must be sent again, None where it need not."""
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
        """Take an operation out of the queue that would be refused again; false if it is to be kept all the same."""
        return self._leaves_out_refused

    def _wait_longer(self) -> None:
        self._retry_at = time.monotonic() + self._backoff.failed()

    def _keep(self, operation: Op) -> None:
        self._kept.append(operation)

    def _forget(self, number: int) -> None:
        """Keep the first `number` operations no longer."""
        del self._kept[:number]

    def _say_away(self, problem: Exception) -> None:
        """Say that the store takes nothing any more."""

    def _say_back(self) -> None:
        """Say that the store has taken everything that was kept."""


def is_refusal_of_content(exc: Exception) -> bool:
    """Whether a server refused what it was sent, rather than the sender or the run. A body that is not JSON, as of a
    proxy between the two, is no answer of MLflow's."""
    if isinstance(exc, json.JSONDecodeError):
        return False
    return getattr(exc, "error_code", "") in REFUSALS[:2] or isinstance(exc, (FileNotFoundError, ValueError, TypeError))


def _is_refusal(exc: Exception) -> bool:
    """Whether the same operation would be refused again."""
    return getattr(exc, "error_code", "") in REFUSALS or is_refusal_of_content(exc)
