"""Messages and sums that are in flight between workers during training, with a limit on their number. A worker waits
only when it reaches the limit, which bounds its lead over the slowest worker from which it receives. Used by
strategies.gossip and strategies.async_sgd."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from scaleray.config import RunConfig
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.contract.parallel import Parallel, Tensors
from scaleray.strategies.traffic.ledger import Entry

Payload = TypeVar("Payload")
BESIDE = "exchanges"
"""Name of such a process group in the ledger of collectives."""
BESIDE_TRAINING = "exchanges during training"
"""Description of process groups whose operations may be in flight for several steps, with a separate timeout."""


class Arrival:
    """Operations of torch.distributed that are in flight. An empty list is an exchange that has already arrived, such
    as one restored from a checkpoint."""

    def __init__(self, works: Sequence[dist.Work], *, is_watched: bool = False) -> None:
        self._works = list(works)
        self._error: BaseException | None = None
        self._is_watched = is_watched and bool(self._works)
        if self._is_watched:
            self._thread = threading.Thread(target=self._watch, name="scaleray-arrival", daemon=True)
            self._thread.start()

    def has_come(self) -> bool:
        """Whether all operations are complete, without waiting."""
        return not self._thread.is_alive() if self._is_watched else all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until all operations are complete. Raises torch's error if a peer is gone."""
        if self._is_watched:
            self._thread.join()
        else:
            self._wait_all()
        if self._error is not None:  # kept: whoever asks again must not take what never came
            raise self._error

    def _watch(self) -> None:
        try:
            self._wait_all()
        except BaseException as exc:  # for the training thread, which meets it when it takes this arrival
            self._error = exc

    def _wait_all(self) -> None:
        while self._works:  # each once: gloo would wait for another message the second time
            self._works[0].wait()
            self._works.pop(0)


class Outstanding(Generic[Payload]):
    """Exchanges in the order in which they began. `take` is called once for each, in that order. most: largest number
    in flight at the end of a step; with 0, each exchange is waited for, and the wait is recorded in `entry`.
    in_order_of_time: take each as soon as it arrives; otherwise exactly `most` steps late, so runs are repeatable."""

    def __init__(self, take: Callable[[Payload], None], entry: Entry, *, most: int, in_order_of_time: bool) -> None:
        self._take, self._entry, self._most, self._early = take, entry, most, in_order_of_time
        self._queue: deque[tuple[Payload, Arrival]] = deque()
        self._begun = 0.0

    def add(self, payload: Payload, arrival: Arrival) -> None:
        """Append an exchange that has begun."""
        self._queue.append((payload, arrival))
        self._begun = time.perf_counter()

    def take_arrived(self) -> None:
        """Take the exchanges that are due or have arrived."""
        while self._queue and (len(self._queue) > self._most or (self._early and self._queue[0][1].has_come())):
            self._take_first()

    def take_all(self) -> None:
        """Wait for all exchanges and take them."""
        while self._queue:
            self._take_first()

    def wait_all(self) -> list[Payload]:
        """Wait for all exchanges in flight and return their payloads, without taking them."""
        for _, arrival in self._queue:
            arrival.wait()
        return [payload for payload, _ in self._queue]

    def _take_first(self) -> None:
        payload, arrival = self._queue[0]
        arrival.wait()
        if not self._most:
            self._entry.waited(time.perf_counter() - self._begun)
        self._queue.popleft()
        self._take(payload)


class Exchange(Protocol):
    """Communication of replicas that never synchronise fully, running concurrently with the training."""

    def before_step(self, step: int) -> None:
        """Begin step `step`, counted from 1."""

    def step(self, step: int) -> None:
        """Send after the optimizer's step, and apply messages that are due."""

    def synchronise(self) -> None:
        """Synchronise with the other replicas, immediately after the consensus distance is measured. Collective."""

    def state(self) -> Tensors:
        """State of this worker, including messages in flight to it. Collective."""

    def load_state(self, saved: Tensors) -> None:
        """Restore what `state` returned."""

    def wait(self) -> None:
        """Wait until nothing is in flight, whether taken or not. Collective."""


def always_apart(replicas: Replicas, exchange: Exchange, group: dist.ProcessGroup, config: RunConfig) -> Parallel:
    """Strategy of replicas that take every step separately and synchronise every `gossip.meet_every` steps. group:
    process group of the exchange."""
    meet_every = config.gossip.meet_every

    def after_update(step: int) -> None:
        exchange.step(step)
        if step % meet_every == 0:
            replicas.consensus_distance()
            exchange.synchronise()

    def close() -> None:
        for parameter in replicas.model.parameters():
            parameter.grad = None
        exchange.wait()
        dist.destroy_process_group(group)

    return replicas.parallel(
        close=close,
        before_step=exchange.before_step,
        after_update=after_update,
        is_local=lambda step: True,
        synchronises=lambda step: step % meet_every == 0,
        state=exchange.state,
        load_state=exchange.load_state,
        bytes_sent=lambda: replicas.sent.num_bytes,
        collectives=replicas.sent.rows,
    )


def group_for_exchanges(group: dist.ProcessGroup, config: RunConfig, *, most: int) -> dist.ProcessGroup:
    """Process group of the same ranks, for messages in flight alongside those of `group`. Collective over all
    processes."""
    # an exchange may be under way for as many steps, each of which may take as long
    timeout = timedelta(seconds=config.scale.collective_timeout_s * (1 + most))
    found = dist.new_group(dist.get_process_group_ranks(group), timeout=timeout, group_desc=BESIDE_TRAINING)
    # NCCL connects a group in its first operation, which all ranks must take part in: the first sends may leave one out
    dist.barrier(group=found)
    return found


def must_be_watched(group: dist.ProcessGroup) -> bool:
    """Whether messages between two ranks need a thread that waits for them, because gloo's never report completion."""
    return str(dist.get_backend(group)) == "gloo"
