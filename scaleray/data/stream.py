"""From a source and a step plan to one rank's batches, in exact order, read ahead of training.

Rows are read in chunks of several steps. Under Ray a chunk is a Ray Data task, so reading and decoding run on any
node; without Ray a thread reads the same chunks. One execution runs across epochs: each new one costs 0.3 s.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.data.row_values import read_alone, row_values_of
from scaleray.data.sources import STORED, Columns, Source
from scaleray.data.step_plan import StepPlan, stream_key
from scaleray.errors import InputStarvedError, ScaleRayError
from scaleray.workload import no_exit

CHUNKS_PER_EXECUTION = 512  # task descriptions are made when an execution starts, so a long run uses several
LOCAL_START_S = 30.0  # how long a worker reads for itself before a late pipeline counts as late
LOCAL_CHUNK_STEPS = (
    64  # steps that it reads at once meanwhile, unless they are large: these rows are read a second time
)
FIRST_EXPLANATION_S = 15.0  # a cold cluster takes about 5 s for its first batch


@dataclass(frozen=True)
class RankBatch:
    """One rank's rows of one step. `num_rows` is 0 when a partial batch had none left for this rank.

    Then the arrays hold one placeholder row, whose loss must not count: every rank has to run the step.
    """

    step: int
    columns: Columns
    num_rows: int


@dataclass(frozen=True)
class Part:
    """Which steps of a plan one rank reads: [first_step, last_step). shares: samples of a full batch by rank; None is equal."""

    plan: StepPlan
    rank: int
    world_size: int
    first_step: int
    last_step: int
    shares: tuple[int, ...] | None = None

    @property
    def rows_per_step(self) -> int:
        """Rows of this rank in a full batch, at least 1."""
        size = self.plan.global_batch_size
        return max(1, size // self.world_size if self.shares is None else self.shares[self.rank])

    def positions(self, steps: range) -> np.ndarray:
        """Where the rows to read for these steps lie in the plan's order; one placeholder row for a step where the rank
        has none."""
        positions = (self.plan.positions(step, self.rank, self.world_size, self.shares) for step in steps)
        own = [p if len(p) else self.plan.positions(step)[:1] for step, p in zip(steps, positions, strict=True)]
        return np.concatenate(own)

    def indices(self, steps: range) -> np.ndarray:
        """Rows to read for these steps, in order."""
        return self.plan.samples_at(self.positions(steps))

    def num_rows(self, step: int) -> int:
        """Rows of this step that count."""
        part = self.plan.rank_slice(step, self.rank, self.world_size, self.shares)
        return part.stop - part.start


def chunks(part: Part, *, row_bytes: int, chunk_bytes: float) -> Iterator[range]:
    """Ranges of steps that are read together: small at first so that training starts early, then `chunk_bytes` each.

    Sources with row groups are read a whole window at a time, or every chunk would read the same groups again.
    """
    most = max(1, int(chunk_bytes // (part.rows_per_step * row_bytes)))
    size = 1
    if part.plan.group_sizes is not None and part.plan.shuffle:
        size = most = max(most, -(-part.plan.window_rows // part.plan.global_batch_size))
    step = part.first_step
    while step < part.last_step:
        yield range(step, min(step + size, part.last_step))
        step += size
        size = min(most, size * 4)


def read_chunk(source: Source, part: Part, steps: range) -> Columns:
    """The rows of these steps, one after another, in the exact order of the plan."""
    with no_exit("the source of the data"):
        return source.read(part.indices(steps))


def read_chunk_alone(source: Source, part: Part, steps: range) -> Columns:
    """The same, with the random numbers that user code draws for a row seeded for it. Nobody else in this process may
    draw any meanwhile."""
    if type(source) in STORED:
        return read_chunk(source, part, steps)
    positions = part.positions(steps)
    return read_alone(source, part.plan.samples_at(positions), lambda: part.plan.row_seeds(positions))


class LocalBlocks(Iterator[Columns]):
    """The chunks of a part, read in this process.

    may_draw: take it that user code draws random numbers, although a first look at a few rows has not shown it.
    """

    def __init__(self, source: Source, part: Part, *, chunk_bytes: float, may_draw: bool = False) -> None:
        self.is_read_alone = type(source) not in STORED and (may_draw or row_values_of(source).draw_random_numbers)
        """Whoever reads must see to it that nobody else in this process draws random numbers meanwhile."""
        # a step at a time, as training stands still while it is read
        steps = chunks(part, row_bytes=source.row_bytes, chunk_bytes=0.0 if self.is_read_alone else chunk_bytes)
        read = read_chunk_alone if self.is_read_alone else read_chunk
        self._blocks = (read(source, part, those) for those in steps)

    def __next__(self) -> Columns:
        return next(self._blocks)


def local_blocks(source: Source, part: Part, *, chunk_bytes: float, may_draw: bool = False) -> LocalBlocks:
    """The chunks of a part, read in this process."""
    return LocalBlocks(source, part, chunk_bytes=chunk_bytes, may_draw=may_draw)


def ray_blocks(
    source_ref: Any, part: Part, *, row_bytes: int, chunk_bytes: float, memory_bytes: float, cpus: float
) -> Iterator[Columns]:
    """The chunks of a part, read by Ray Data tasks and delivered in order.

    source_ref: the source in the object store. cpus: Ray CPUs that this rank's tasks may use together.
    """
    import ray
    import ray.data

    everything = chunks(part, row_bytes=row_bytes, chunk_bytes=chunk_bytes)
    while segment := list(itertools.islice(everything, CHUNKS_PER_EXECUTION)):
        dataset = ray.data.range(len(segment), override_num_blocks=len(segment)).map_batches(
            _read_in_task,
            batch_size=None,
            batch_format="numpy",
            num_cpus=min(1.0, cpus),
            fn_args=(source_ref, part, segment),
        )
        dataset.context.enable_progress_bars = False
        options = dataset.context.execution_options
        options.preserve_order = True
        options.resource_limits = options.resource_limits.copy(cpu=cpus, object_store_memory=memory_bytes)
        yield from dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=2)


class Demand:
    """What the consumer of a stream is doing, for whoever fills it. Set by the StepStream it is given to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        """The consumer has asked for its first batch."""
        self.is_closed = threading.Event()
        self.is_hungry: Callable[[], bool] = lambda: True
        """Whether the consumer will soon have to wait."""


def start_locally(
    local: Iterable[Columns], remote: Iterable[Columns], demand: Demand, *, patience_s: float = LOCAL_START_S
) -> Iterator[Columns]:
    """The rows of `remote`, the first of them read from `local`, which gives the same rows in the same order.

    Tasks on a cold cluster take seconds to start, and their start competes with the building of the model for the same
    cores. So `remote` starts when training begins, and until its first block is here, at most `patience_s` long, the
    consumer's hunger is stilled from `local`. What came from there is left out of `remote`.
    """
    here = iter(local)
    num_rows = 0
    for block in itertools.islice(here, 1):
        num_rows += _num_rows(block)
        yield block
    while not demand.has_begun.wait(timeout=0.2):
        if demand.is_closed.is_set():
            return
    arrived: queue.Queue[Columns | BaseException | None] = queue.Queue(maxsize=2)
    threading.Thread(target=_pump, args=(remote, arrived, demand), name="scaleray-tasks", daemon=True).start()
    until = time.monotonic() + patience_s
    while arrived.empty() and not demand.is_closed.is_set():
        if time.monotonic() < until and demand.is_hungry():
            read = next(here, None)
            if read is None:
                return  # everything is read before the first task has started
            num_rows += _num_rows(read)
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
        skipped = min(num_rows, _num_rows(item))
        num_rows -= skipped
        if skipped < _num_rows(item):
            yield {name: values[skipped:] for name, values in item.items()} if skipped else item


def _pump(blocks: Iterable[Columns], arrived: queue.Queue[Columns | BaseException | None], demand: Demand) -> None:
    try:
        for block in blocks:
            _put(arrived, block, demand)
            if demand.is_closed.is_set():
                return
        _put(arrived, None, demand)
    except BaseException as exc:  # carried to the thread that fills the stream
        _put(arrived, exc, demand)
    finally:
        _close(blocks)  # ends the tasks that nobody waits for any more


def _put(target: queue.Queue[Any], item: Any, demand: Demand) -> None:
    while not demand.is_closed.is_set():
        try:
            return target.put(item, timeout=0.5)
        except queue.Full:
            continue


def _close(blocks: Iterable[Columns]) -> None:
    """End a generator, by the thread that ran it; anything else has nothing to end."""
    if isinstance(blocks, Generator):
        blocks.close()


def _num_rows(block: Columns) -> int:
    return len(next(iter(block.values())))


def _read_in_task(ids: Columns, source_ref: Any, part: Part, segment: list[range]) -> Columns:
    import ray

    source = ray.get(source_ref)
    # a task has its process for itself while it runs
    pieces = [read_chunk_alone(source, part, segment[int(i)]) for i in ids["id"]]
    return pieces[0] if len(pieces) == 1 else {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}


def stream_blocks(iterator: Any, part: Part, *, shuffle: bool, window_rows: int) -> Iterator[Columns]:
    """A Ray Dataset's shard for this rank, epoch after epoch, in whatever order it comes."""
    batch_rows = max(1, part.plan.global_batch_size // part.world_size)
    first_epoch, passed = part.plan.place(part.first_step)
    skipped = passed // part.world_size  # read again and left out: a stream cannot start in the middle
    for epoch in range(first_epoch, part.plan.place(part.last_step - 1)[0] + 1):
        remaining = part.plan.num_samples // part.world_size
        shuffling = (
            {
                "local_shuffle_buffer_size": window_rows,
                "local_shuffle_seed": stream_key(part.plan.seed, "data", epoch) % 2**32,
            }
            if shuffle
            else {}
        )
        for block in iterator.iter_batches(batch_size=max(batch_rows, 1024), batch_format="numpy", **shuffling):
            length = len(next(iter(block.values())))
            wanted = slice(min(skipped, length), min(length, remaining))
            skipped -= wanted.start
            if wanted.stop > wanted.start:
                yield {name: values[wanted] for name, values in block.items()}
            remaining -= min(length, remaining)
            if not remaining:
                break


def rebatch(blocks: Iterable[Columns], sizes: Iterable[int]) -> Iterator[Columns]:
    """Cut blocks of any length into pieces of the given sizes, in order."""
    pending: list[Columns] = []
    available = 0
    source = iter(blocks)
    for size in sizes:
        while available < size:
            block = next(source, None)
            if block is None:
                return
            available += len(next(iter(block.values())))
            pending.append(block)
        piece: list[Columns] = []
        missing = size
        while missing:
            block = pending[0]
            length = len(next(iter(block.values())))
            taken = min(missing, length)
            piece.append({name: values[:taken] for name, values in block.items()})
            if taken == length:
                pending.pop(0)
            else:
                pending[0] = {name: values[taken:] for name, values in block.items()}
            missing -= taken
        available -= size
        # copies: Ray's blocks are read-only shared memory, which training must not see
        yield {
            name: np.concatenate([p[name] for p in piece]) if len(piece) > 1 else np.array(piece[0][name])
            for name in piece[0]
        }


class StepStream:
    """Iterates over the RankBatches of a part; a thread reads ahead. `waited_s` is the time spent waiting so far.

    LocalBlocks that are to be read alone are not read ahead: the thread reads a batch while whoever asks for it waits,
    and so draws no random numbers of its own. Everything else stays as it is, such as the limit on the wait.

    others_wait_s: how long the other workers wait for this one at the moment, which the wait for a batch stays below: else
    they would be the first to fail, over a collective. demand: the one that `blocks` watches, if it watches any. explain_wait: called when the first batches are late;
    returns a sentence for the user, or None.
    """

    def __init__(
        self,
        blocks: Iterable[Columns],
        part: Part,
        *,
        row_bytes: int = 1,
        prefetch_bytes: float = 2**28,
        timeout_s: float = 300.0,
        others_wait_s: Callable[[], float] = lambda: math.inf,
        demand: Demand | None = None,
        explain_wait: Callable[[], str | None] = lambda: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.waited_s = 0.0
        self._is_finished = False
        self.others_wait_s = others_wait_s
        self._part, self._timeout_s, self._explain_wait, self._warn = part, timeout_s, explain_wait, warn
        step_bytes = max(1, part.rows_per_step * row_bytes)
        self._queue: queue.Queue[RankBatch | BaseException | None] = queue.Queue(
            maxsize=int(min(4096, max(2, prefetch_bytes // step_bytes)))
        )
        self._demand = demand or Demand()
        self._demand.is_hungry = lambda: self._queue.qsize() < LOCAL_CHUNK_STEPS // 2
        self._closed = self._demand.is_closed
        self._reads_ahead = not (isinstance(blocks, LocalBlocks) and blocks.is_read_alone)
        self._asked = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._fill, args=(blocks,), name="scaleray-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        if self._is_finished:
            raise StopIteration
        self._demand.has_begun.set()
        started = time.perf_counter()
        self._asked.release()
        item = self._get(started)
        self.waited_s += time.perf_counter() - started
        self._is_finished = not isinstance(item, RankBatch)
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise _original_error(item)
        return item

    def close(self, *, wait_s: float = 0.0) -> None:
        """Stop reading ahead, and wait up to `wait_s` until nobody reads the source any more. Safe to call twice."""
        self._closed.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(timeout=wait_s)

    def _get(self, started: float) -> RankBatch | BaseException | None:
        explained = False
        waited = 0.0
        while True:
            limit_s = min(self._timeout_s, self.others_wait_s())
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
                        limit += f", but the other workers wait no longer: {limit_s:g} s follow from scale.collective_timeout_s"
                    raise InputStarvedError(f"no input for {waited:.0f} s ({limit}): {reason}") from None

    def _fill(self, blocks: Iterable[Columns]) -> None:
        steps = range(self._part.first_step, self._part.last_step)
        delivered = self._part.first_step
        try:
            pieces = rebatch(blocks, (max(1, self._part.num_rows(step)) for step in steps))
            for step in steps:
                if not self._reads_ahead and not self._wait_until_asked():
                    return
                columns = next(pieces, None)
                if columns is None:
                    break
                _put(self._queue, RankBatch(step, columns, self._part.num_rows(step)), self._demand)
                delivered = step + 1
                if self._closed.is_set():
                    return
            if delivered < self._part.last_step:
                raise RuntimeError(f"the input ended after step {delivered} of {self._part.last_step}")
            _put(self._queue, None, self._demand)
        except BaseException as exc:  # carried to the training thread and raised there
            _put(self._queue, exc, self._demand)
        finally:
            _close(blocks)

    def _wait_until_asked(self) -> bool:
        """Whether the next batch is asked for, rather than the stream closed."""
        while not self._closed.is_set():
            if self._asked.acquire(timeout=0.5):
                return True
        return False


def _original_error(exc: BaseException) -> BaseException:
    """The error that the reading code raised, out of the layers that Ray Data wraps around it."""
    seen: list[BaseException] = []
    current: BaseException | None = exc
    while current is not None and current not in seen:
        if isinstance(current, ScaleRayError):
            return current
        seen.append(current)
        current = current.__cause__ or getattr(current, "cause", None) or current.__context__
    return exc


def ray_starvation_reason() -> Callable[[], str | None]:
    """An explanation for a late input under Ray: whether the cluster has any CPU free for the reading tasks."""

    def explain() -> str | None:
        import ray

        free = ray.available_resources().get("CPU", 0.0)
        if free >= 0.1:
            return None
        total = ray.cluster_resources().get("CPU", 0.0)
        return f"the cluster has {free:g} of {total:g} CPUs free, so the input tasks cannot run; training or another job holds the rest. Use fewer workers or a smaller scale.cpus_per_worker"

    return explain
