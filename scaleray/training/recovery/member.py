"""A worker's connection to the coordinator of recoveries."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import math
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from scaleray.errors import PeerLostError
from scaleray.training.health.worker_progress import COLLECTIVES
from scaleray.training.process_group import join_group
from scaleray.training.recovery.connections import GroupConnections
from scaleray.training.recovery.coordinator import BEAT, BROKEN, DONE, FAILED, HELLO, KEPT, LOST, OVER, RANDOM, READY
from scaleray.training.setup.stores import StorePlace

RandomState = dict[str, torch.Tensor]
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h
LEFT_WITHIN_S = 5.0
"""Seconds, plus two steps, within which a worker must leave a collective of a group that has lost a member."""
IDLE_S = 1.0
"""Seconds within which it must leave a collective whose connections have all ended, if it is not waiting for a GPU."""
WAITING = (*COLLECTIVES, "torch/autograd/")
"""Files in which a thread waits for other workers; a backward pass waits for DDP's collectives."""
REPORTED_WITHIN_S = 1.0
"""Seconds within which the coordinator reports a loss that has made a collective fail."""


@dataclass(frozen=True)
class Group:
    """Membership of this worker in one epoch. nodes: node of each rank. random: last random states of the rank, by
    step, as its previous holder sent them. lost: workers lost since the last epoch. grows: whether a worker has joined
    a smaller group. broken_at: wall-clock time at the end of the last epoch."""

    epoch: int
    name: str
    rank: int
    nodes: tuple[str, ...]
    store: StorePlace
    random: dict[int, RandomState]
    lost: tuple[str, ...]
    grows: bool
    broken_at: float

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.nodes)

    @property
    def local_rank(self) -> int:
        """Number of this worker among the workers on its node."""
        return self.nodes[: self.rank].count(self.nodes[self.rank])

    @property
    def local_world_size(self) -> int:
        """Number of workers on this worker's node."""
        return self.nodes.count(self.nodes[self.rank])

    def join(self, backend: str, timeout_s: float, device: str) -> None:
        """Form the process group. Collective. Fails if a member is lost: the coordinator then closes the store."""
        join_group(
            self.store,
            backend,
            timeout_s,
            name=self.name,
            node=self.nodes[self.rank],
            device=device,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=self.local_world_size,
            node_rank=list(dict.fromkeys(self.nodes)).index(self.nodes[self.rank]),
        )


class Member:
    """This worker's connection to the coordinator at `place`. number: its number among all workers and spares."""

    def __init__(self, place: StorePlace, token: str, *, number: int, node: str, silent_s: float) -> None:
        gc.freeze()  # modules, with which a collection between two groups would take 0.2 s
        self.place, self.broken_epoch, self._epoch = place, 0, 0
        self._connections = GroupConnections()
        self._socket = socket.create_connection((place.host, place.port), timeout=silent_s * 10)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the connection ends if the coordinator's node does not answer
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * silent_s))
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._leaving, self._has_left = threading.Lock(), True
        self._longest_s, self._stepped_at = 0.0, math.inf
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last_random: RandomState = {}
        self._num_sent, self._num_kept, self._has_answer = 0, 0, threading.Condition()
        self._send(HELLO, token=token, number=number, node=node, pid=os.getpid())
        threading.Thread(target=self._receive, name="scaleray-member", daemon=True).start()
        threading.Thread(target=self._beat, args=(silent_s / 8,), name="scaleray-member-beat", daemon=True).start()

    def next_group(self) -> Group | None:
        """Wait for the next group; None once the training is complete. Raises PeerLostError without a coordinator."""
        self._thread_id = threading.get_ident()
        with self._leaving:
            self._has_left = True  # from here on, connections may be the next group's
        self._send(READY)
        while (message := self._next()) is not None and message["kind"] == BROKEN:
            pass  # of a group that this worker has left
        if message is None:
            raise PeerLostError("the coordinator of recoveries is lost")
        if message["kind"] == OVER:
            return None
        with self._leaving:
            self._epoch, self._last_random, self._stepped_at = message["epoch"], {}, math.inf
            self._connections, self._has_left = GroupConnections(), False
        return Group(
            message["epoch"],
            message["name"],
            message["rank"],
            tuple(message["nodes"]),
            StorePlace(self.place.host, message["port"]),
            {int(step): _decoded(state) for step, state in message["random"].items()},
            tuple(message["lost"]),
            message["grows"],
            message["broken_at"],
        )

    def is_group_broken(self) -> bool:
        """Whether the group has lost a member. A loss causes many kinds of errors before the coordinator reports it."""
        deadline = time.monotonic() + REPORTED_WITHIN_S
        while self.broken_epoch != self._epoch and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.broken_epoch == self._epoch

    def lose_group(self) -> None:
        """Report that the group is broken, and end its collectives."""
        self._send(LOST, epoch=self._epoch)
        self._end_collectives(self._epoch)

    def keep_random(self, rank: int, step: int, state: RandomState) -> None:
        """Send the random state of a rank in a step, if it has changed since the last call, and wait until the
        coordinator has received it. Without it, others could complete a step after which no other worker could take
        over this rank."""
        now = time.monotonic()
        self._longest_s, self._stepped_at = max(self._longest_s, now - self._stepped_at), now
        last = self._last_random
        if last.keys() != state.keys() or any(not torch.equal(last[name], value) for name, value in state.items()):
            self._last_random = state
            self._num_sent += 1
            self._send(RANDOM, rank=rank, step=step, state=_encoded(state), number=self._num_sent)
            with self._has_answer:
                self._has_answer.wait_for(self._needs_no_answer)

    def complete(self) -> bool:
        """Report that this worker has trained to the end, and return whether all others have too; False if one was lost
        before. Without a coordinator, no one waits for the others."""
        self._send(DONE)
        while (message := self._next()) is not None:
            if message["kind"] == OVER or message["epoch"] == self._epoch:
                return message["kind"] == OVER
        return True

    def fail(self) -> None:
        """Report that this worker ends with an error of its own, and end the connection."""
        self._send(FAILED)
        self.close()

    def close(self) -> None:
        """End the connection, as the end of the process would. To the others, this worker is then lost."""
        self._stop.set()
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def _needs_no_answer(self) -> bool:
        is_kept = self._num_kept >= self._num_sent
        return is_kept or self._stop.is_set() or self.broken_epoch == self._epoch

    def _next(self) -> dict[str, Any] | None:
        """The next message, or None, now and in later calls, if the coordinator is lost."""
        if (message := self._messages.get()) is None:
            self._messages.put(None)
        return message

    def _send(self, kind: str, **values: Any) -> None:
        data = json.dumps({"kind": kind, **values}).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:  # the training continues without a coordinator, until a worker is lost
                self._stop.set()

    def _receive(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    if message["kind"] == KEPT:
                        self._answer(message["number"])
                        continue
                    if message["kind"] == BROKEN:
                        self.broken_epoch = message["epoch"]
                        self._answer()
                        threading.Thread(target=self._see_off, args=[message["epoch"]], daemon=True).start()
                    self._messages.put(message)
            except OSError:
                pass
        self._stop.set()
        self._answer()
        self._messages.put(None)

    def _answer(self, number: int = 0) -> None:
        """Wake the thread that waits for an answer from the coordinator."""
        with self._has_answer:
            self._num_kept = max(self._num_kept, number)
            self._has_answer.notify_all()

    def _end_collectives(self, epoch: int) -> tuple[bool, bool]:
        """Close the connections of an epoch's group, unless this worker has left it. Returns whether it has left, and
        whether all connections had ended before."""
        with self._leaving:
            has_left = self._has_left or self._epoch != epoch
            return has_left, not has_left and self._connections.close()

    def _see_off(self, epoch: int) -> None:
        """End collectives until this worker has left the group. If it does not leave one, end the process: the others
        have the same state, and a spare takes over this worker as well. When a connection ends in the middle of a
        message, gloo loses track of that message and waits until the collective's timeout."""
        position, since = None, 0.0
        while not (ended := self._end_collectives(epoch))[0]:
            frame = sys._current_frames().get(self._thread_id)
            is_inside = frame is not None and any(part in frame.f_code.co_filename for part in WAITING)
            has_clock = hasattr(time, "pthread_getcpuclockid")  # macOS has none
            is_idle = ended[1] and has_clock and not torch.cuda.is_initialized()
            cpu_s = 0.0
            with contextlib.suppress(OSError):  # the thread has ended
                cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread_id)) if is_idle else 0.0
            now = (id(frame), frame.f_lasti, cpu_s) if frame is not None and is_inside else None
            if now is None or now != position:
                position, since = now, time.monotonic()
            elif time.monotonic() - since > (IDLE_S if is_idle else LEFT_WITHIN_S + 2 * self._longest_s):
                os._exit(EXIT_CODE)
            time.sleep(0.1)

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            self._send(BEAT)


def _encoded(state: RandomState) -> dict[str, Any]:
    return {
        name: [str(value.dtype).removeprefix("torch."), base64.b64encode(value.numpy().tobytes()).decode()]
        for name, value in state.items()
    }


def _decoded(state: dict[str, Any]) -> RandomState:
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))
        for name, (dtype, data) in state.items()
    }
