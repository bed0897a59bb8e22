"""Stream of one rank's batches from a source and a step plan, in exact order, read ahead of training.

Rows are read in chunks of several steps: by Ray tasks, so that reading and decoding run on any node, or by a thread of
this process.
"""

import dataclasses
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from scaleray.data.blocks import LocalBlocks, close_blocks, rebatch
from scaleray.data.collate_ahead import CollateAhead
from scaleray.data.local_start import LOCAL_CHUNK_STEPS, Demand, deliver
from scaleray.data.rank_batch import RankBatch
from scaleray.data.rank_part import Part
from scaleray.data.source_interface import Columns
from scaleray.errors import InputStarvedError, ScaleRayError

FIRST_EXPLANATION_S = 15.0  # a cold cluster takes about 5 s for its first batch
MADE_AHEAD = 16  # batches that are made ahead: more would be thrown away where micro-batches or shares change
GROUP_BYTES = 2**22  # small batches are handed over together: waking the other thread takes longer than cutting one


Delivery = list[RankBatch] | BaseException | None
"""Consecutive batches, an error, or None for the end."""


class _Deliveries(queue.Queue[Delivery]):
    """Queue whose size is the number of batches in it."""

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self.num_batches = 0

    def _qsize(self) -> int:
        return self.num_batches

    def _put(self, item: Delivery) -> None:
        super()._put(item)
        self.num_batches += _size(item)

    def _get(self) -> Delivery:
        item = super()._get()
        self.num_batches -= _size(item)
        return item


def _size(item: Delivery) -> int:
    return len(item) if isinstance(item, list) else 1


class StepStream:
    """Iterator over the RankBatches of a part, which may be divided again; a thread reads ahead. `waited_s` is the
    total waiting time in seconds.

    LocalBlocks that must be read alone are not read ahead: the thread reads a batch while its consumer waits and draws
    no random numbers. Everything else is the same, such as the limit on the wait.

    open_blocks: returns the rows of a part, for a consumer whose Demand it may watch. timeout_s: limit on the wait for
    a batch. others_wait_s: seconds after which other workers stop waiting for this one; the wait stays below this, as
    they would otherwise fail first, in a collective. explain_wait: called when the first batches are late; returns a
    sentence for the user, or None."""

    def __init__(
        self,
        open_blocks: Callable[[Part, Demand], Iterable[Columns]],
        part: Part,
        *,
        row_bytes: int = 1,
        prefetch_bytes: float = 2**28,
        timeout_s: float = 300.0,
        others_wait_s: Callable[[], float] = lambda: math.inf,
        explain_wait: Callable[[], str | None] = lambda: None,
        warn: Callable[[str], None] = lambda text: None,
        collate: CollateAhead | None = None,
    ) -> None:
        self.waited_s = 0.0
        self._open_blocks, self._row_bytes, self._prefetch_bytes = open_blocks, row_bytes, prefetch_bytes
        self._timeout_s, self._others_wait_s = timeout_s, others_wait_s
        self._explain_wait, self._warn, self._collate = explain_wait, warn, collate
        self._start(part)

    def cut(self, step: int, shares: tuple[int, ...] | None) -> None:
        """Switch this rank to the batches of these shares from `step` on, which must be the next step.

        Batches that were read ahead are dropped. The old reader has `timeout_s` to release the source, which need not
        support two readers."""
        started = time.perf_counter()
        self.close(wait_s=self._timeout_s)
        self._start(dataclasses.replace(self._part, first_step=step, shares=shares))
        self.waited_s += time.perf_counter() - started

    def _start(self, part: Part) -> None:
        """Start reading a part ahead, with a new queue and thread."""
        self._part, self._is_finished = part, False
        made_bytes = 0 if self._collate is None else self._collate.row_bytes
        step_bytes = max(1, part.rows_per_step * (self._row_bytes + made_bytes))
        most = int(min(4096 if self._collate is None else MADE_AHEAD, max(2, self._prefetch_bytes // step_bytes)))
        deliveries = _Deliveries(maxsize=most)
        self._queue, self._demand = deliveries, Demand()
        self._ready: deque[RankBatch] = deque()
        self._demand.is_hungry = lambda: deliveries.qsize() < LOCAL_CHUNK_STEPS // 2
        group = int(min(most // 2, max(1, GROUP_BYTES // step_bytes)))
        groups = _groups(self._open_blocks(part, self._demand), part, self._demand, group, self._collate)
        arguments = (groups, deliveries, self._demand)
        self._thread = threading.Thread(target=deliver, args=arguments, name="scaleray-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        if self._is_finished:
            raise StopIteration
        if not self._ready:
            self._demand.has_begun.set()
            started = time.perf_counter()
            self._demand.asked.release()
            item = self._get(started)
            self.waited_s += time.perf_counter() - started
            self._is_finished = not isinstance(item, list)
            if item is None:
                raise StopIteration
            if isinstance(item, BaseException):
                raise _original_error(item)
            self._ready.extend(item)
        return self._ready.popleft()

    def close(self, *, wait_s: float = 0.0) -> None:
        """Stop reading ahead, and wait up to `wait_s` until no thread reads the source. Safe to call twice."""
        self._demand.is_closed.set()
        self._ready.clear()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(timeout=wait_s)

    def _get(self, started: float) -> Delivery:
        explained = False
        waited = 0.0
        while True:
            limit_s = min(self._timeout_s, self._others_wait_s())
            try:
                return self._queue.get(timeout=min(1.0, max(0.0, limit_s - waited) + 0.01))
            except queue.Empty:
                waited = time.perf_counter() - started
                if not explained and waited > min(FIRST_EXPLANATION_S, limit_s / 2):
                    explained = True
                    reason = self._explain_wait() or "its source is slow"
                    self._warn(f"the input has delivered nothing for {waited:.0f} s: {reason}")
                if waited > limit_s:
                    reason = self._explain_wait() or "its source is slow"
                    limit = f"data.timeout_s is {self._timeout_s:g}"
                    if limit_s < self._timeout_s:
                        limit += f"; the other workers wait only {limit_s:g} s, by scale.collective_timeout_s"
                    raise InputStarvedError(f"no input for {waited:.0f} s ({limit}): {reason}") from None


def _groups(
    blocks: Iterable[Columns], part: Part, demand: Demand, most: int, collate: CollateAhead | None
) -> Iterator[list[RankBatch]]:
    """Cut blocks into groups of at most `most` batches of a part. An available batch does not wait for one that must be
    read or collated rather than copied."""
    reads_ahead = not (isinstance(blocks, LocalBlocks) and blocks.is_read_alone)
    copies = isinstance(blocks, LocalBlocks) and blocks.is_in_memory and collate is None
    steps = range(part.first_step, part.last_step)
    group: list[RankBatch] = []
    if not reads_ahead or collate is not None:
        most = 1
    try:
        pieces = rebatch(blocks, (max(1, part.num_rows(step)) for step in steps))
        for step in steps:
            if not reads_ahead and not demand.wait_until_asked():
                return
            piece = next(pieces, None)
            if piece is None:
                raise RuntimeError(f"the input ended after step {step} of {part.last_step}")
            columns, rows_left = piece
            batch = RankBatch(step, columns, part.num_rows(step), cuts=part.token_cuts(step))
            group.append(batch if collate is None else collate(batch))
            is_early = copies and len(group) >= group[0].step - part.first_step  # the first batches come one by one
            if len(group) >= most or is_early or not (copies or rows_left >= part.rows_per_step):
                yield group
                group = []
    except Exception:
        if group:
            yield group
        raise
    finally:
        close_blocks(blocks)
    if group:
        yield group


def _original_error(exc: BaseException) -> BaseException:
    """The scaleray error raised by the reading code, without the layers that Ray wraps around it. Other errors are
    unchanged, since Ray's text names the user's line."""
    seen: list[BaseException] = []
    current: BaseException | None = exc
    while current is not None and current not in seen:
        for error in (getattr(current, "cause", None), current):  # Ray's own layer has the class of its cause as well
            if isinstance(error, ScaleRayError):
                return error
        seen.append(current)
        current = current.__cause__ or getattr(current, "cause", None) or current.__context__
    return exc
