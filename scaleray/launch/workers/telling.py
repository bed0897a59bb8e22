"""Pass messages of a group's running workers to the driver immediately."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

POLL_S = 0.5


@contextlib.contextmanager
def handing_over(tell: Callable[[Any], None]) -> Iterator[Callable[[Any], None]]:
    """Yield a function for Ray workers that passes its arguments to `tell` in this process, in a thread; the last ones
    at the end.

    Raises the errors of `tell`."""
    from ray.exceptions import RayError
    from ray.util.queue import Empty, Queue

    queue = Queue(actor_options={"num_cpus": 0})
    is_over = threading.Event()
    errors: list[Exception] = []

    def hand_over() -> None:
        while True:
            try:
                message = queue.get(timeout=POLL_S)
            except Empty:
                if is_over.is_set():
                    return
                continue
            except RayError:  # the queue's process is gone, with the cluster most likely
                return
            try:
                tell(message)
            except Exception as exc:  # the driver's to raise, in its own thread
                errors.append(exc)

    thread = threading.Thread(target=hand_over, name="scaleray-told", daemon=True)
    thread.start()
    try:
        try:
            yield queue.put
        finally:
            is_over.set()
            thread.join(timeout=30)
    finally:
        queue.shutdown(force=True)
    if errors:
        raise errors[0]
