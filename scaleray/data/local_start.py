"""Start of a stream on a cold cluster: the worker reads the first rows itself until the tasks deliver."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scaleray.data.blocks import close_blocks
from scaleray.data.source_interface import Columns, rows_in

LOCAL_START_S = 30.0  # a worker reads for itself so long, until a late pipeline counts as late
LOCAL_CHUNK_STEPS = (
    64  # a worker reads so many steps at once meanwhile, unless they are large: these rows are read a second time
)


class Demand:
    """State of a stream's consumer for its producer, set by the StepStream."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        """Set when the consumer has requested its first batch."""
        self.is_closed = threading.Event()
        self.is_hungry: Callable[[], bool] = lambda: True
        """Whether the consumer will soon have to wait."""
        self.asked = threading.Semaphore(0)
        """Released for each batch that the consumer requests."""

    def wait_until_asked(self) -> bool:
        """Wait until the next batch is requested or the stream is closed, and return whether it was requested."""
        while not self.is_closed.is_set():
            if self.asked.acquire(timeout=0.5):
                return True
        return False


def start_locally(
    local: Iterable[Columns], remote: Iterable[Columns], demand: Demand, *, patience_s: float = LOCAL_START_S
) -> Iterator[Columns]:
    """Yield the rows of `remote`, but read the first ones from `local`, which has the same rows in the same order.

    Tasks on a cold cluster take seconds to start, and their start competes with the building of the model for the same
    cores. Therefore `remote` starts when training begins. Until its first block arrives, for at most `patience_s`
    seconds, the consumer gets rows from `local`, which `remote` then leaves out."""
    here = iter(local)
    num_rows = 0
    for block in itertools.islice(here, 1):
        num_rows += rows_in(block)
        yield block
    while not demand.has_begun.wait(timeout=0.2):
        if demand.is_closed.is_set():
            return
    arrived: queue.Queue[Columns | BaseException | None] = queue.Queue(maxsize=2)
    threading.Thread(target=deliver, args=(remote, arrived, demand), name="scaleray-tasks", daemon=True).start()
    until = time.monotonic() + patience_s
    while arrived.empty() and not demand.is_closed.is_set():
        if time.monotonic() < until and demand.is_hungry():
            read = next(here, None)
            if read is None:
                return  # everything is read before the first task has started
            num_rows += rows_in(read)
            yield read
        else:
            time.sleep(0.005)
    while not demand.is_closed.is_set():
        try:
            item = arrived.get(timeout=0.1)  # a stream may be closed while its tasks hang
        except queue.Empty:
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            return
        skipped = min(num_rows, rows_in(item))
        num_rows -= skipped
        if skipped < rows_in(item):
            yield {name: values[skipped:] for name, values in item.items()} if skipped else item


def deliver(items: Iterable[Any], target: queue.Queue[Any], demand: Demand) -> None:
    """Put items into a queue as soon as it has room, followed by None or an error for the consumer to raise. Stops
    early if the consumer closes its stream."""

    def put(item: Any) -> None:
        while not demand.is_closed.is_set():
            try:
                return target.put(item, timeout=0.5)
            except queue.Full:
                continue

    try:
        for item in items:
            put(item)
            if demand.is_closed.is_set():
                return
        put(None)
    except BaseException as exc:
        put(exc)
    finally:
        close_blocks(items)  # ends the tasks that nobody waits for any more
