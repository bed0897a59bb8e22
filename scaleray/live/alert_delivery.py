"""Deliver alerts to a webhook and a command, one thread each. Failures never reach the training.

A slow, unreachable or broken receiver is tried a limited number of times. Its address, which may hold a secret, is
never logged."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence

from scaleray.common.http_client import HttpError, fetch
from scaleray.config.alerts import without_secret

MOST_WAITING = 100
"""Most alerts that wait for a receiver; further ones are dropped."""
FIRST_PAUSE_S = 1.0
SHOWN_ANSWER = 200
TRIED_AGAIN = (408, 425, 429)
"""Status codes below 500 that are worth a retry."""


class DeliveryError(Exception):
    """A receiver rejected an alert. may_later: whether another attempt may help."""

    def __init__(self, why: str, *, may_later: bool = True) -> None:
        super().__init__(why)
        self.may_later = may_later


class Delivery:
    """Delivers bodies to one receiver, in their order. send: makes one attempt, and raises DeliveryError.

    say: logs the first failure, and the first after a success. pause: waits, or returns true when the run is over."""

    def __init__(
        self,
        name: str,
        send: Callable[[bytes], None],
        *,
        attempts: int,
        say: Callable[[str], None],
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self.name, self.send, self.attempts, self.say = name, send, attempts, say
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(maxsize=MOST_WAITING)
        self._is_over = threading.Event()
        self._pause = pause or self._is_over.wait
        self._has_failed = False
        self._thread = threading.Thread(target=self._deliver, name=f"scaleray-{name}", daemon=True)
        self._thread.start()

    def put(self, alert: str, body: bytes) -> None:
        """Queue an alert, by its name. Returns immediately."""
        try:
            self._waiting.put_nowait((alert, body))
        except queue.Full:
            self._fail(alert, f"{MOST_WAITING} others are already waiting")

    def close(self, wait_s: float) -> None:
        """Deliver the waiting alerts within this time, without waiting longer for receivers."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=wait_s)
        self._is_over.set()

    def _deliver(self) -> None:
        while (item := self._waiting.get()) is not None and not self._is_over.is_set():
            alert, body = item
            problem = ""
            for attempt in range(self.attempts):
                if attempt and self._pause(FIRST_PAUSE_S * 2 ** (attempt - 1)):
                    problem = f"{problem}; the run is over"
                    break
                try:
                    self.send(body)
                except DeliveryError as exc:
                    problem = f"{exc} (attempt {attempt + 1} of {self.attempts})"
                    if not exc.may_later:
                        break
                except Exception as exc:  # a slip of ours must not end the deliveries
                    problem = type(exc).__name__
                else:
                    self._has_failed, problem = False, ""
                    break
            if problem:
                self._fail(alert, problem)

    def _fail(self, alert: str, problem: str) -> None:
        if not self._has_failed:
            self.say(
                f"alert {alert} was not delivered to {self.name}: {problem}; it is in alerts.jsonl of the run's folder"
            )
        self._has_failed = True


def to_webhook(address: str, *, timeout_s: float) -> Callable[[bytes], None]:
    """One attempt to post a body to an address."""

    def send(body: bytes) -> None:
        kind = {"Content-Type": "application/json"}
        try:
            fetch(address, timeout_s=timeout_s, headers=kind, body=body, most=SHOWN_ANSWER)
        except HttpError as exc:
            if exc.status is not None:
                may_later = exc.status >= 500 or exc.status in TRIED_AGAIN
                raise DeliveryError(f"HTTP status {exc.status}", may_later=may_later) from None
            if exc.was_connected and isinstance(exc.cause, TimeoutError):
                raise DeliveryError(f"no answer within {timeout_s:g} s") from None
            # once connected, the kind alone: other texts may have the address
            why = type(exc.cause).__name__ if exc.was_connected else _why(exc.cause)
            raise DeliveryError(f"the connection failed: {why}") from None

    return send


def _why(reason: object) -> str:
    """The system's error text, which has no address; otherwise the error's type."""
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__


def to_command(command: Sequence[str], *, timeout_s: float) -> Callable[[bytes], None]:
    """One attempt to run a command with a body on its standard input."""

    def send(body: bytes) -> None:
        try:
            done = subprocess.run(list(command), input=body, capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeliveryError(f"the command did not finish within {timeout_s:g} s") from None
        except OSError as exc:
            raise DeliveryError(f"the command could not be run: {exc.strerror}", may_later=False) from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:SHOWN_ANSWER]
            raise DeliveryError(f"the command exited with code {done.returncode}" + (f": {last}" if last else ""))

    return send


def webhook_named(address: str) -> str:
    """Name of the webhook in messages."""
    return f"alerts.webhook ({without_secret(address)})"
