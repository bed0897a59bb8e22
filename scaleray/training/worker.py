"""Function that Ray Train runs on every worker, and its connection to the recorder's actor."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch

from scaleray.common.idle_warnings import leave_out_idle_warnings
from scaleray.errors import WorkloadError
from scaleray.records.run_record import Heartbeat, WorkerMessage, WorkerSummary
from scaleray.records.start import PROCESSES, WORKER_IMPORTS, StartClock
from scaleray.records.worker_requests import ControlRequest
from scaleray.training.health.worker_progress import Tail, TailHandler
from scaleray.training.rank import Channel, run_rank
from scaleray.training.ray_metrics import RankPublisher
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Control
from scaleray.training.state.live_state import LiveState
from scaleray.training.state.memory_copies import Holders

if TYPE_CHECKING:
    from scaleray.training.assignment import Assignment
    from scaleray.training.setup.job import TrainJob

TAIL_LINES = 20
RECENT_MESSAGES = 200
"""Number of messages kept in case the recorder is lost before it has written them."""


def train(config: dict[str, Any]) -> WorkerSummary | None:
    """See `assignment.train_worker`."""
    import ray
    import ray.train

    quieten_ray()
    assignment: Assignment = received(config["task"])
    start = StartClock(assignment.job.started_at, assignment.job.start_ends)
    start.end(PROCESSES, psutil.Process().create_time())
    start.end(WORKER_IMPORTS)
    has_spares = assignment.coordinator is not None
    workers = assignment.job.world_size if has_spares else ray.train.get_context().get_world_size()
    job = assignment.job.on(workers).changed(start_ends=start.ends)
    context = context_under_ray(uses_gpu=job.config.scale.gpus > 0)
    publisher = RankPublisher(*assignment.published_as) if assignment.published_as else None
    sender = Sender(assignment.recorder, interval_s=job.config.tracking.interval_s, publisher=publisher)
    train = partial(
        run_rank,
        channel=Channel(sender, sender.beat, sender.flush, sender.durable),
        sources=assignment.sources,
        run_path=assignment.run_path,
        facts=assignment.facts,
        control=Control(notice=_nodes_to_go if assignment.can_be_preempted else None),
        tail=_keep_tail(),
        ends_hangs=True,
        holders=_holders(assignment, sender),
    )
    with publisher or contextlib.nullcontext():
        return _train_in_groups(assignment, job, context, train) if has_spares else train(job, context)


def _train_in_groups(
    assignment: Assignment, job: TrainJob, context: RankContext, train: Callable[..., WorkerSummary]
) -> WorkerSummary | None:
    """Train as any rank that the coordinator of recoveries assigns. context: this worker among workers and spares."""
    import ray

    from scaleray.training.recovery.member import Group, Member
    from scaleray.training.recovery.recovering import train_in_groups

    config = assignment.job.config
    actor = ray.get_runtime_context().current_actor
    place, token = ray.get(assignment.coordinator.admit.remote(context.rank, actor))
    member = Member(place, token, number=context.rank, node=context.node, silent_s=config.recovery.silent_s)

    def join(group: Group) -> None:
        group.join(config.scale.backend, config.scale.collective_timeout_s, str(context.device))

    def train_as(group: Group, live: LiveState) -> WorkerSummary:
        changes = {name: getattr(group, name) for name in ("rank", "world_size", "local_rank", "local_world_size")}
        return train(job.on(group.world_size), dataclasses.replace(context, **changes), live=live)

    return train_in_groups(member, join, train_as)


def _holders(assignment: Assignment, sender: Sender) -> Holders | None:
    """Holders of copies in memory, if they are enabled; the one on this node is started if it does not exist yet."""
    import ray

    from scaleray.training.recovery.node_holders import holder_here, other_holders

    memory, recorder = assignment.job.config.checkpoint.memory, assignment.recorder
    if memory is None:
        return None
    return Holders(
        holder_here(assignment.run_path, label=memory.place),
        lambda: other_holders(assignment.run_path),
        sender.recent,
        lambda: int(ray.get(recorder.last_step.remote(), timeout=90)),
    )


def received(task: Any) -> Any:
    """Payload that the driver sent to this worker. Raises WorkloadError if it needs a module that is missing here."""
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.RaySystemError as exc:
        # Ray puts a traceback below its first line
        reason = str(exc).splitlines()[0].removeprefix("System error: ")
        raise WorkloadError.problem(
            "Cannot unpickle",
            f"the workload on {ray.util.get_node_ip_address()}: {reason}",
            "install the package on every node, or keep the module next to the workload's file, which is sent along",
        ) from None


def quieten_ray() -> None:
    """Suppress messages of Ray's libraries and torchao on a worker, if unneeded or better reported by the driver."""
    leave_out_idle_warnings()
    logging.getLogger("ray._private.serialization").setLevel(logging.CRITICAL)  # `received` reports it
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.train.v2._internal.util").setLevel(logging.CRITICAL)  # the driver says each error, once
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # says that progress bars are off


def _keep_tail() -> deque[str]:
    """The last lines that this process prints or logs from now on."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    sys.stdout, sys.stderr = Tail(sys.stdout, tail), Tail(sys.stderr, tail)
    logging.getLogger().addHandler(TailHandler(tail))  # others hold the streams as they were before
    return tail


def _nodes_to_go() -> frozenset[str]:
    """Nodes whose workers the cluster will soon remove."""
    import ray.train

    info = ray.train.get_preemption_info()
    return frozenset(info.preempted_node_to_ranks) if info is not None else frozenset()


class Sender:
    """Sends messages to the recorder in batches without waiting for it. publisher: also receives the messages."""

    def __init__(self, recorder: Any, *, interval_s: float, publisher: RankPublisher | None = None) -> None:
        self.recorder, self.interval_s, self.publisher = recorder, interval_s, publisher
        self._buffer: list[WorkerMessage] = []
        self._recent: deque[WorkerMessage] = deque(maxlen=RECENT_MESSAGES)
        self._sent_at = time.monotonic()
        self._last: Any = None
        self._under_way: list[WorkerMessage] = []
        self._num_taken = self._num_arrived = 0
        self._lock = threading.Lock()  # checkpoints send from a thread of their own

    def __call__(self, *messages: WorkerMessage) -> None:
        """Queue messages, and send the queue if an interval has passed since the last time; without messages, send it
        now."""
        with self._lock:
            self._buffer += messages
            self._recent += messages
            self._num_taken += len(messages)
            if not messages or time.monotonic() - self._sent_at >= self.interval_s:
                # one call at a time: the recorder takes several at once, and would not keep their order
                if self._is_free() and self._buffer:
                    self._under_way, self._buffer = self._buffer, []
                    self._last = self.recorder.log.remote(self._under_way)
                self._sent_at = time.monotonic()
        if self.publisher is not None:
            for message in messages:
                self.publisher.on_message(message)

    def recent(self) -> list[WorkerMessage]:
        """The last messages, some of which may not have arrived, or not have been written by the recorder."""
        with self._lock:
            self._is_free()
            waiting = [*self._under_way, *self._buffer]
            return waiting if len(waiting) > len(self._recent) else list(self._recent)

    def beat(self, heartbeat: Heartbeat) -> ControlRequest:
        """Deliver a heartbeat immediately, and return the recorder's request."""
        import ray

        return ControlRequest(ray.get(self.recorder.beat.remote(heartbeat), timeout=30))

    def flush(self) -> bool:
        """Send all waiting messages and wait until they have arrived. Returns whether they have.

        Called after the last step, where waiting delays nothing."""
        import ray

        with self._lock:
            wanted = self._num_taken
        for _ in range(3):  # what is under way, what waited behind it, and what did not arrive
            self()
            if self._last is not None:
                ray.wait([self._last], timeout=30)
            with self._lock:
                self._is_free()
                if self._num_arrived >= wanted:
                    return True
        logging.getLogger(__name__).warning("the recorder did not receive the last messages of this worker")
        return False

    def durable(self) -> Any:
        """State of the recorder for a run, once all of its messages are written. Raises RuntimeError if some are not: a
        run resumed from here would lack the missing steps."""
        import ray

        if not self.flush():
            raise RuntimeError("the recorder has not received the steps before it")
        try:
            return ray.get(self.recorder.durable.remote(), timeout=90)
        except ray.exceptions.RayError as exc:  # a plain one: Ray's cannot be pickled, and other ranks must hear of it
            raise RuntimeError(
                f"the recorder has not stored the steps before it: {str(exc).splitlines()[-1]}"
            ) from None

    def _is_free(self) -> bool:
        """Whether no message is in flight.

        Messages that did not arrive are queued again. If only the answer was lost, they are sent twice, which the
        recorder detects."""
        import ray

        if self._last is None:
            return True
        if not ray.wait([self._last], timeout=0)[0]:
            return False
        try:
            ray.get(self._last)
            self._num_arrived += len(self._under_way)
        except ray.exceptions.RayError:
            self._buffer = [*self._under_way, *self._buffer]
        self._last, self._under_way = None, []
        return True


def context_under_ray(*, uses_gpu: bool) -> RankContext:
    """Context of this process among Ray Train's workers. Its GPU, if it uses one, becomes the current device."""
    import ray
    import ray.train.torch

    own, device = ray.train.get_context(), torch.device("cpu")
    if uses_gpu:
        device = ray.train.torch.get_device()
        torch.cuda.set_device(device)
    return RankContext(
        rank=own.get_world_rank(),
        world_size=own.get_world_size(),
        local_rank=own.get_local_rank(),
        local_world_size=own.get_local_world_size(),
        node=ray.util.get_node_ip_address(),
        device=device,
    )
