"""A few gloo processes that stay up for the whole test session, so that a test on 4 ranks costs milliseconds.

A test hands over a module-level function, which is pickled by reference and called as `function(place, *args)` on the
first `world_size` processes. The default process group is made again when the world size changes or a rank failed.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from scaleray.launch.workers import forks

LARGEST_WORLD = 4
HOST = "127.0.0.1"
COLLECTIVE_TIMEOUT_S = 60.0
GRACE_S = 15.0
SUBGROUPS_KEPT = 4  # the thread of a gloo group wakes a hundred times a second, used or not
# one forking process serves the product's groups and the commands of `forked_command` as well
COMMANDS = ("scaleray.cli", "scaleray.launch.run.train", "mlflow.store.tracking.sqlalchemy_store")
PRELOADED = (*forks.PRELOADED, "hypothesis", *COMMANDS)


@dataclass(frozen=True)
class Failure:
    """What a rank raised. `error` is None when it could not be pickled."""

    rank: int
    error: BaseException | None
    text: str


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    group: int
    port: int


class GlooPool:
    """Starts its processes with the first test that needs them; `stop` ends them by their own handles."""

    def __init__(self, *, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._group, self._group_size = 0, 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of all ranks. Raises what a rank raised, the lowest rank's own error first."""
        outcomes = self.attempt(world_size, function, *args)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            # ranks that only lost their peer say so; the one that began it is more telling
            lost = ("Connection closed", "Connection reset", "no answer")
            first = next((f for f in failures if not any(words in f.text for words in lost)), failures[0])
            if first.error is not None:
                first.error.add_note(f"on rank {first.rank}:\n{first.text}")
                raise first.error
            raise RuntimeError(f"rank {first.rank} failed:\n{first.text}")
        return outcomes

    def attempt(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, or the Failure of a rank that raised."""
        assert 1 <= world_size <= LARGEST_WORLD
        self._start()
        if world_size != self._group_size:
            self._group, self._group_size = self._group + 1, world_size
        task = _Task(function, args, world_size, self._group, self._store.port)
        for pipe in self._pipes[:world_size]:
            pipe.send(task)
        outcomes = self._receive(world_size)
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            self._group_size = 0
        return outcomes

    def stop(self) -> None:
        """Ask the processes to leave (so that they write their coverage), and end those that do not."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
        self._end()

    def _start(self) -> None:
        if self._processes:
            return
        import torch.distributed as dist

        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        for rank in range(LARGEST_WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), name=f"gloo-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _receive(self, world_size: int) -> list[Any]:
        outcomes: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        deadline = time.monotonic() + self.timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = Failure(rank, None, "the process died")
                if isinstance(outcomes[rank], Failure):  # the others lose their peer, and seldom need long to see it
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            outcomes[rank] = Failure(rank, None, "no answer: it was ended")
        if waiting or any(isinstance(o, Failure) and o.text == "the process died" for o in outcomes.values()):
            self._end()
        return [outcomes[rank] for rank in range(world_size)]

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._group_size = [], [], 0


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    atexit.register(os._exit, 0)  # coverage has been written by then, and taking torch apart lasts seconds
    import torch
    import torch.distributed as dist

    from scaleray.training.setup.rank_context import RankContext

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: every change of groups collects garbage, and need not walk through torch
    group = 0
    while True:
        try:
            task: _Task | None = pipe.recv()
        except EOFError:
            return
        if task is None:
            break
        try:
            if task.group != group:
                _leave_group()
                store = dist.TCPStore(HOST, task.port, is_master=False)
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"group {task.group}", store),
                    rank=rank,
                    world_size=task.world_size,
                    timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                )
                group = task.group
            _leave_subgroups()  # only now: all ranks have ended the last task
            place = RankContext(
                rank, task.world_size, local_rank=rank, local_world_size=task.world_size, node=f"node {rank}"
            )
            outcome = task.function(place, *task.args)
            pickle.dumps(outcome)
        except BaseException as exc:
            outcome = Failure(rank, _picklable(exc), traceback.format_exc())
        torch.use_deterministic_algorithms(False)  # a task that builds a deterministic set-up leaves the switch on
        if isinstance(outcome, Failure):
            group = 0
            # closes the sockets, so that ranks inside a collective fail at once instead of waiting; only now, as the
            # frames of the error would keep them open
            _leave_group()
        pipe.send(outcome)
    _leave_group()


def _leave_group() -> None:
    import torch.distributed as dist

    _forget_tasks()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_subgroups() -> None:
    """Leave the groups that tasks made and left behind, once there are several: leaving is local to a process."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    made = [group for group in _world.pg_map if group is not dist.group.WORLD]
    if len(made) > SUBGROUPS_KEPT:
        for group in made:
            dist.destroy_process_group(group)
        made.clear()
        _forget_tasks()


def _forget_tasks() -> None:
    """Drop what still holds groups of past tasks: caches with their meshes, which compare equal to those of the next
    group and would lead to groups that are gone, and wrappers that are garbage."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    gc.collect()


def _picklable(exc: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(exc))
    except Exception:
        return None
