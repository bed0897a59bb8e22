"""A group of gloo processes that breaks on purpose, as a worker of a training would, and what its ranks write down.

Such processes cannot come from the shared pool. They are forked from where torch is imported already, and ended by their
own handles as soon as the dumps tell what they are expected to.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gloo_pool import HOST, PRELOADED

from scaleray.errors import PeerLostError

GROUP = "20261123-120000"
TIMEOUT_S = 60.0
LIMIT_S = 1.5


class HangingGroup:
    """Processes in which `case(rank, world_size)` runs, with the watch of a worker beside it."""

    def __init__(self, processes: list[Any], pipes: list[Any], run_path: Path) -> None:
        self.processes, self.pipes, self.run_path = processes, pipes, run_path

    @property
    def folder(self) -> Path:
        return self.run_path / "hangs" / GROUP

    def beats(self) -> list[Any]:
        """The last signs of life, as the recorder would have them."""
        from scaleray.records.run_record import Heartbeat

        size = len(self.processes)
        return [Heartbeat(r, "here", p.pid, 7, "loss", 1.0, (), size) for r, p in enumerate(self.processes)]

    def look(self, mute: Sequence[int] = ()) -> None:
        """Let every rank that runs look at itself as if it had stood still for long. mute: ranks that are not asked."""
        asked = []
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            with contextlib.suppress(OSError):
                if process.is_alive() and rank not in mute:
                    pipe.send("look")
                    asked.append(pipe)
        for pipe in asked:
            with contextlib.suppress(EOFError, OSError):
                pipe.recv()


@contextlib.contextmanager
def hanging(case: Callable[[int, int], None], world_size: int, run_path: Path) -> Iterator[HangingGroup]:
    """Start the processes; end them with the context."""
    import torch.distributed as dist

    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (case, rank, world_size, store.port, str(run_path), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield HangingGroup(processes, pipes, run_path)
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)
        for pipe in pipes:
            pipe.close()


def _serve(case: Callable[[int, int], None], rank: int, world_size: int, port: int, run_path: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from scaleray.training.health import flight_recorder, stall_watch
    from scaleray.training.health.worker_progress import Progress
    from scaleray.training.setup.rank_context import RankContext

    torch.set_num_threads(1)
    os.environ[stall_watch.GROUP_VARIABLE] = GROUP
    flight_recorder.switch_on()
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore(HOST, port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    progress, place = Progress(), RankContext(rank, world_size, node="here")
    progress.finish_step(7)
    progress.enter("forward")
    watch = stall_watch.StallWatch(
        progress, place, run_path, collective_timeout_s=LIMIT_S / stall_watch.STALL_SHARE, look_every_s=0.05
    )

    def looks() -> None:
        while True:
            if pipe.poll(0.05):
                pipe.recv()
                progress.since = time.monotonic()  # another stall: each look writes anew
                watch.look(1e6, True)
                pipe.send("looked")
            watch.look(0.0, True)  # puts off what speaks for a process that cannot

    with watch:
        threading.Thread(target=looks, daemon=True).start()
        try:
            case(rank, world_size)
        except RuntimeError as exc:
            raise PeerLostError("another worker is gone") from exc
        time.sleep(600)  # the end of its training, which others do not come to


# what goes wrong: rank 1 does it


def all_reduce(length: int = 16, dtype: str = "float32") -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(length, dtype=getattr(torch, dtype)))


def broadcast() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(4), 0)


def meet(world_size: int) -> None:
    """Wait until all ranks are here, without a collective: gloo is still busy with one that this rank is done with."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < world_size:
        time.sleep(0.01)


def skips(rank: int, world_size: int) -> None:
    all_reduce(4)
    if rank != 1:
        all_reduce()  # rank 1 leaves this out
    all_reduce()


def other_order(rank: int, world_size: int) -> None:
    for step in range(2):
        if rank == 1 and step == 1:
            broadcast()  # before the other
            all_reduce()
        else:
            all_reduce()
            broadcast()


def other_size(rank: int, world_size: int) -> None:
    all_reduce(4)
    meet(world_size)
    all_reduce(64 if rank == 1 else 16)


def other_type(rank: int, world_size: int) -> None:
    all_reduce(4)
    meet(world_size)
    all_reduce(16, "float64" if rank == 1 else "float32")


def sleeps(rank: int, world_size: int) -> None:
    all_reduce(4)
    meet(world_size)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if rank == 1:
        store.set("asleep", "yes")
        time.sleep(600)  # asleep in user code
    store.wait(["asleep"])  # rank 1 may be the last to leave the meeting
    all_reduce()


def holds_the_lock(rank: int, world_size: int) -> None:
    all_reduce(4)
    meet(world_size)
    if rank == 1:
        ctypes.PyDLL(None).sleep(600)  # a PyDLL does not let go of Python's lock
    all_reduce()
