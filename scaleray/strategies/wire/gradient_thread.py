"""A thread or stream next to the backward pass in which buckets are processed, one after another in the order in which
they come.

A hook that continues in a future's callback would start its next collective whenever the last one happens to end: with
gloo that is another order on every rank, and ranks would mix up their buckets.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

Work = Callable[[], torch.Tensor]


class Lane:
    """Thread on the CPU, stream on CUDA: there collectives are only queued, and the host continues. The CUDA half has
    been reviewed, not run. `close` ends the thread; so does the end of the lane's life.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future] | None] = queue.SimpleQueue()
        self.close = weakref.finalize(self, self._waiting.put, None)
        if self.stream is None:
            threading.Thread(target=_serve, args=(self._waiting,), name="scaleray-gradients", daemon=True).start()

    def submit(self, work: Work) -> torch.futures.Future[torch.Tensor]:
        """Future of what `work` returns, after all that came before it.
        Its error is raised where the future is waited for."""
        if self.stream is None:
            done: torch.futures.Future = torch.futures.Future()
            self._waiting.put((work, done))
            return done.then(_result)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            ready: torch.futures.Future = torch.futures.Future(devices=[self.device])
            ready.set_result(work())
        return ready


def _serve(waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future] | None]) -> None:
    while (item := waiting.get()) is not None:
        work, done = item
        try:
            with torch.no_grad():
                result: object = work()
        except BaseException as exc:
            result = exc
        done.set_result(result)
        del item, work, done, result  # while waiting, hold nothing that belongs to others


def _result(done: torch.futures.Future) -> torch.Tensor:
    # DDP waits in C++, which takes a future's exception for its value; only one raised here it sees as an error
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, torch.Tensor)
    return result
