"""Coordinator of a training that may lose workers: it decides which workers train, and as which rank.

It runs in a process that does not train. Workers connect to it by TCP and exchange lines of JSON with it; when a
connection ends, its worker counts as lost. Each membership is an epoch with its own store, at which its members form
their process group, so that no worker of an older epoch can join it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scaleray.training.setup.stores import OwnedStore, StorePlace, open_store

if TYPE_CHECKING:
    import torch.distributed as dist

HELLO, READY, LOST, BEAT, RANDOM, DONE, FAILED = "hello", "ready", "lost", "beat", "random", "done", "failed"
"""Messages from a worker: its facts; it is waiting for a group; its group is broken; it is alive; its random state in a
step; it has trained to the end; it ends with an error of its own."""
GROUP, BROKEN, OVER, KEPT = "group", "broken", "over", "kept"
"""Messages to a worker: its next group; its group has lost a member; the training is over; its random state arrived."""
LONGEST_LINE = 2**22
FIRST_GROUP_S = 20.0
KEPT_STATES = 2
"""Number of random states stored for each rank, since members differ by at most one step."""


@dataclass
class _Worker:
    """A connected worker. number: its number among all workers and spares."""

    number: int
    node: str
    pid: int
    writer: asyncio.StreamWriter
    seen_at: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_done: bool = False
    has_failed: bool = False

    @property
    def text(self) -> str:
        return f"worker {self.number} on {self.node} (process {self.pid})"

    def send(self, kind: str, **values: Any) -> None:
        self.writer.write(json.dumps({"kind": kind, **values}).encode() + b"\n")


class Coordinator:
    """Forms groups of `num_ranks` workers, and replaces lost members with spares as long as there are any.

    host: address of this machine for the workers. token: secret that a worker must send. silent_s: seconds without a
    sign of life after which a worker counts as lost and is killed. shrinks: if no spare is left, the other members form
    a smaller group, which grows when a worker joins; otherwise they wait for one. first_group_s: seconds that the first
    group waits for the workers with the lowest numbers before others take their ranks. end: kills a worker, given its
    number, node and process id; by default a process of this machine. say: receives a sentence about each loss."""

    def __init__(
        self,
        host: str,
        num_ranks: int,
        *,
        token: str,
        silent_s: float,
        shrinks: bool = False,
        first_group_s: float = FIRST_GROUP_S,
        end: Callable[[int, str, int], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.host, self.num_ranks, self.token, self.silent_s = host, num_ranks, token, silent_s
        self.shrinks, self.first_group_s, self._end, self._say = shrinks, first_group_s, end or _kill, say
        self.epoch, self.is_over = 0, False
        self._is_running = self._grows = False
        self._workers: dict[int, _Worker] = {}
        self._members: dict[int, _Worker] = {}
        self._lost: list[str] = []
        self._size = num_ranks
        self._broken_at = 0.0
        self._store: dist.Store | None = None
        self._random: dict[int, dict[int, Any]] = {rank: {} for rank in range(num_ranks)}
        self._started_at, self._name = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
        self._loop = asyncio.new_event_loop()
        is_up: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_up,), name="scaleray-coordinator", daemon=True)
        self._thread.start()
        is_up.wait()

    @property
    def place(self) -> StorePlace:
        """Address for the workers."""
        return StorePlace(self.host, self._port)

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    def _run(self, is_up: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, 0, limit=LONGEST_LINE))
        self._port: int = server.sockets[0].getsockname()[1]
        is_up.set()
        tasks = {self._loop.create_task(self._look())}
        self._loop.run_forever()
        self.is_over, self._store = True, None
        server.close()
        tasks |= asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # connections are closed in a turn of their own
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: _Worker | None = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if worker is None:
                    if not hmac.compare_digest(str(message.get("token", "")), self.token):
                        return
                    worker = _Worker(message["number"], message["node"], message["pid"], writer)
                    self._workers[worker.number] = worker
                worker.seen_at = time.monotonic()
                self._take(worker, message)
        # a reset, lines from elsewhere, or the end
        except (OSError, ValueError, LookupError, TypeError, AttributeError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            if worker is not None and self._workers.get(worker.number) is worker:
                self._lose(worker)

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == READY:
            worker.is_ready = True
            if self.is_over:
                worker.send(OVER)
            self._form()
            self._grow(worker)
        elif kind == LOST and message["epoch"] == self.epoch:
            self._break()
        elif kind == RANDOM:
            states = self._random[message["rank"]]
            states[message["step"]] = message["state"]
            for step in sorted(states)[:-KEPT_STATES]:
                del states[step]
            worker.send(KEPT, number=message["number"])
        elif kind == FAILED:
            worker.has_failed = True
        elif kind == DONE and self._is_running:
            worker.is_done = True
            self.is_over = all(member.is_done for member in self._members.values())
            for other in self._workers.values() if self.is_over else ():
                other.send(OVER)

    def _lose(self, worker: _Worker) -> None:
        """Forget a worker whose connection has ended."""
        del self._workers[worker.number]
        rank = next((rank for rank, member in self._members.items() if member is worker), None)
        if rank is None or self.is_over:
            return
        del self._members[rank]
        self._lost.append(f"rank {rank} ({worker.text})")
        self._say(f"rank {rank} ({worker.text}) {'ended with an error' if worker.has_failed else 'was lost'}")
        self._break()
        self._form()

    def _break(self) -> None:
        """End the current epoch, so that its members leave their group and wait for the next one."""
        if self._is_running and not self.is_over:
            self._is_running, self._broken_at = False, time.time()
            self._store = None  # so that no member waits there for one that is lost
            for member in self._members.values():
                member.send(BROKEN, epoch=self.epoch)

    def _grow(self, worker: _Worker) -> None:
        """Let a smaller group take in a worker that is waiting."""
        members = self._members.values()
        has_room = self._is_running and worker not in members and len(members) < self.num_ranks
        if has_room and not any(member.is_done for member in members):
            self._grows = True
            self._break()

    def _form(self) -> None:
        """Begin the next epoch if there are enough workers and all members of the last one have left it."""
        if self._is_running or self.is_over or not all(member.is_ready for member in self._members.values()):
            return
        free = [rank for rank in range(self.num_ranks) if rank not in self._members]
        members = list(self._members.values())
        spares = sorted((w for w in self._workers.values() if w.is_ready and w not in members), key=lambda w: w.number)
        if self.epoch == 0 and time.monotonic() - self._started_at < self.first_group_s:
            spares = [worker for worker in spares if worker.number < self.num_ranks]
        if len(spares) < len(free) and not (self.shrinks and self.epoch and (members or spares)):
            return
        self._members.update(zip(free, spares, strict=False))
        if len(self._members) != self._size:  # other ranks, which draw other random numbers
            self._random = {rank: {} for rank in range(self.num_ranks)}
        self._size = len(self._members)
        self._members = {rank: self._members[old] for rank, old in enumerate(sorted(self._members))}
        self.epoch += 1
        self._is_running = True
        owned = OwnedStore(self.host)
        self._store = open_store(owned.place)
        nodes = [self._members[rank].node for rank in range(self._size)]
        for rank, member in self._members.items():
            member.is_ready = member.is_done = False
            member.send(
                GROUP,
                epoch=self.epoch,
                name=self._name,
                rank=rank,
                nodes=nodes,
                port=owned.place.port,
                random=self._random[rank],
                lost=self._lost,
                grows=self._grows,
                broken_at=self._broken_at,
            )
        self._lost, self._grows = [], False

    async def _look(self) -> None:
        """End workers that send nothing, because their process has stopped or cannot be reached."""
        while True:
            await asyncio.sleep(self.silent_s / 4)
            self._form()
            for worker in list(self._workers.values()):
                if time.monotonic() - worker.seen_at > self.silent_s and not self.is_over:
                    with contextlib.suppress(Exception):  # of the system, or of Ray: the watch must not end with it
                        self._end(worker.number, worker.node, worker.pid)
                    worker.writer.close()
                    self._lose(worker)


def _kill(number: int, node: str, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
