"""Groups of plain gloo processes on this machine, which run the same checks without the cost of a Ray cluster."""

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

from scaleray.common.guarded import end_with_parent
from scaleray.common.own_folder import keep_compiled_code_here
from scaleray.errors import DataError, PeerLostError, RunFailedError, ScaleRayError
from scaleray.launch.workers.forks import PRELOADED, without_main
from scaleray.launch.workers.hang_reports import with_explanation
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.stores import OwnedStore, StorePlace, open_store
from scaleray.workload import load_workload, no_exit


def refuse_streams(job: TrainJob) -> None:
    """Raise DataError if a split is a Ray Dataset."""
    streamed = [name for name, split in job.splits.items() if split.is_streamed]
    if streamed:
        raise DataError(f"the {streamed[0]} data", "a Ray Dataset", "--local runs without Ray", "leave --local out")


HOST = "127.0.0.1"
GRACE_S = 10.0  # seconds after a rank's error for what the others have to say
ENDED = "the process ended"
TOLD, ASKED = "told", "asked"
"""First element of a process's messages, in place of its success."""


@dataclass(frozen=True)
class UserCode:
    """Reference through which a process gets the workload: its name, or the object itself."""

    name: str | None
    args: Mapping[str, Any]
    base_dir: Path | None
    workload: Any = None

    def load(self) -> Any:
        """The workload in this process."""
        return self.workload if self.name is None else load_workload(self.name, self.args, base_dir=self.base_dir)


@dataclass(frozen=True)
class OnFirst:
    """Argument for rank 0 only, since it may be large; all other ranks get None."""

    value: Any


class GlooProcesses:
    """`world_size` processes that run functions one after another, in groups of up to this size."""

    def __init__(self, processes: list[Any], pipes: list[Connection], timeout_s: float, watched_in: str | None) -> None:
        self._processes, self._pipes, self._timeout_s = processes, pipes, timeout_s
        self._num_groups = 0
        self._watched_in, self._started_at = watched_in, time.strftime("%Y%m%d-%H%M%S")

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        workload: Any,
        on_message: Callable[[Any], Any] = lambda message: None,
    ) -> Any:
        """Result of `function(place, *args)` on rank 0. Raises the error of a rank.

        workload: the object that each process replaces by its own. on_message: receives messages at once. A process
        sends one with the function that replaces TELL in its arguments; if it waits for an answer, it gets the value
        that on_message returns."""
        self._num_groups += 1
        watch = None if self._watched_in is None else (self._watched_in, f"{self._started_at}-{self._num_groups}")
        for pipes, is_first in ((self._pipes[:1], True), (self._pipes[1:world_size], False)):
            given = [(a.value if is_first else None) if isinstance(a, OnFirst) else a for a in args]
            content = pickled((function, given), workload)
            for pipe in pipes:
                pipe.send((self._num_groups, world_size, self._timeout_s, watch))
                pipe.send_bytes(content)
        answers, failures = self._receive(world_size, on_message)
        if failures:
            cause = _first_cause(failures)
            raise cause if watch is None else with_explanation(cause, *watch, world_size)
        return answers[0]

    def _receive(
        self, world_size: int, on_message: Callable[[Any], Any]
    ) -> tuple[dict[int, Any], dict[int, tuple[BaseException | None, str]]]:
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[BaseException | None, str]] = {}
        while waiting:
            ready: list[Any] = wait(list(waiting), timeout=GRACE_S if failures else None)
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                value: Any
                try:
                    is_good, value = pipe.recv()
                    if is_good in (TOLD, ASKED):
                        waiting[pipe] = rank
                        answer = on_message(value)
                        if is_good == ASKED:
                            pipe.send(answer)
                        continue
                except (EOFError, ConnectionError):
                    self._processes[rank].join(timeout=5)
                    is_good, value = False, (None, _ended_with(self._processes[rank].exitcode))
                if is_good:
                    answers[rank] = value
                else:
                    failures[rank] = value
        return answers, failures


@contextmanager
def gloo_processes(
    world_size: int, user_code: UserCode, *, timeout_s: float, watched_in: str | None = None
) -> Iterator[GlooProcesses]:
    """Start the processes, and end them with the context.

    timeout_s: time limit of a collective. watched_in: folder for reports of trainings that hang; None: do not watch
    them."""
    keep_compiled_code_here()
    meeting = OwnedStore(HOST)
    store = open_store(meeting.place)  # the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, meeting.place, pickled(user_code), theirs, dict(os.environ)),
                name=f"scaleray-gloo-{rank}",
                daemon=True,
            )
            with without_main():
                process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield GlooProcesses(processes, pipes, timeout_s, watched_in)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        for pipe in pipes:
            pipe.close()
        del store
        meeting.close()


def _serve(rank: int, meeting: StorePlace, user_code: bytes, pipe: Connection, environment: dict[str, str]) -> None:
    code: UserCode = pickle.loads(user_code)  # made by the process that started this one
    os.environ.clear()  # the environment that it was forked with is as old as the first group
    os.environ.update(environment)
    end_with_parent()  # one that was killed does not end its processes, and these may be in the middle of a step
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver ends its processes
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo may pick an address that the machine cannot reach
    import torch
    import torch.distributed as dist

    from scaleray.training.health import flight_recorder
    from scaleray.training.health.worker_errors import without_frames

    flight_recorder.switch_on()
    torch.set_num_threads(1)
    while True:
        try:
            number, world_size, timeout_s, watch = pipe.recv()
            content = pipe.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            known = {"workload": code.load(), "tell": Teller(pipe)}
            function, args = _Unpickler(io.BytesIO(content), known).load()
            if not gc.get_freeze_count():
                gc.freeze()  # imported modules stay: a collection after each training need not visit them
            if world_size > 1:
                store = dist.PrefixStore(f"group {number}", open_store(meeting))
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
                )
            place = RankContext(rank, world_size, local_rank=rank, local_world_size=world_size)
            with no_exit("the workload's code"), _watching(place, watch, timeout_s):
                result = function(place, *args)
            message = (True, result if rank == 0 else None)
        except Exception as exc:
            message = (False, (exc if isinstance(exc, ScaleRayError) else None, traceback.format_exc()))
            without_frames(exc)
            gc.collect()  # a group that is known closes no connection, and the others would wait for this rank
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            pipe.send(message)
        except ConnectionError:  # whoever asked is gone, killed most likely, and nobody wants to read about it here
            return


def _watching(
    place: RankContext, watch: tuple[str, str] | None, timeout_s: float
) -> contextlib.AbstractContextManager[object]:
    """Context in which this process's trainings are watched for hangs. watch: folder and name of the group."""
    if watch is None:
        return contextlib.nullcontext()
    from scaleray.training.health.group_watch import GroupWatch

    return GroupWatch(place, *watch, collective_timeout_s=timeout_s)


class Teller:
    """Connection by which a running process sends messages to the process that started it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, value: Any) -> None:
        """Send a message. Not for concurrent use by threads."""
        self._pipe.send((TOLD, value))

    def ask(self, value: Any, saying: contextlib.AbstractContextManager[object]) -> Any:
        """Send a message and wait for the answer, in one thread only. saying: lock for sending, not for waiting."""
        with saying:
            self._pipe.send((ASKED, value))
        return self._pipe.recv()


class _Tell:
    """Placeholder for the function with which a process sends messages to the one that started it."""


TELL = _Tell()


class _Pickler(pickle.Pickler):
    """Pickler that omits the workload, since a class from a user's file exists only in this process. It pickles
    functions and classes of the main script or notebook by value, since no other process imports it."""

    workload: Any = TELL

    def persistent_id(self, value: Any) -> str | None:
        return "workload" if value is self.workload else "tell" if value is TELL else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type | FunctionType) or value.__module__ != "__main__":
            return NotImplemented
        import cloudpickle  # as MLflow and Ray use it

        return pickle.loads, (cloudpickle.dumps(value),)  # only for processes that this one started


def pickled(value: Any, workload: Any = TELL) -> bytes:
    """Pickle a value for processes that this one starts. workload: the object that each process replaces by its own."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.workload = workload
    pickler.dump(value)
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.known = known

    def persistent_load(self, name: Any) -> Any:
        return self.known[name]


def _first_cause(failures: dict[int, tuple[BaseException | None, str]]) -> BaseException:
    """The failure that caused the others, if it is known; ranks that only lost a peer are less informative."""
    for rank, (_, text) in sorted(failures.items()):
        if text.startswith(ENDED):
            return RunFailedError(f"rank {rank} failed: {text}")
    known = [error for _, (error, _) in sorted(failures.items()) if isinstance(error, ScaleRayError)]
    lost = ("onnection closed", "Gloo", "gloo")
    telling = [e for e in known if not isinstance(e, PeerLostError) and not any(words in str(e) for words in lost)]
    if known:
        return (telling or known)[0]
    rank, (_, text) = min(failures.items())
    return RunFailedError(f"rank {rank} failed: {(text.strip().splitlines() or ['no message'])[-1]}")


def _ended_with(code: int | None) -> str:
    """Description of how a process ended that sent no result."""
    if code != -signal.SIGKILL:
        return f"{ENDED} with code {code}"
    return f"{ENDED} by SIGKILL, as the system does when memory runs out: use fewer workers or a smaller model"
