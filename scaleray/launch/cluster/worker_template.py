"""A process that has imported the libraries of Ray's workers, and from which workers are forked. Ray itself starts each
worker as a fresh interpreter, in which importing torch, Ray and the training loop takes 4 CPU seconds.

The template is started before Ray (`WorkerTemplate`), and `lean_node.py` makes the raylet run `as_fork.py` instead of
Ray's own scripts. Each such process sends its arguments, environment and streams here, and a fork of this process runs
Ray's worker with them. If that fails, `as_fork.py` runs Ray's own command.

The template runs this file as a module, in two stages, since Ray's core reads its job only once, at its import: one
process with all libraries except Ray, and for each job a child of it with Ray, whose children are the workers. Each has
one thread and must not touch a GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scaleray.common.own_folder import plain_executable, short_path
from scaleray.common.private_parts import FORKED_WORKERS
from scaleray.launch.cluster import ray_settings

LIBRARIES = ("numpy", "torch._dynamo", "torch.distributed.fsdp", "pyarrow", "pandas")
"""Libraries imported once for all jobs. Creating any torch optimizer imports torch's compiler."""
OF_A_JOB = ("ray.train.torch",)
MOST_JOBS = 4
"""Number of jobs whose processes are kept; later workers of older jobs need a new process."""
SCRIPT = Path(__file__).with_name("as_fork.py")
SOCKET = "WORKER_TEMPLATE_SOCKET"
ORIGINAL = "WORKER_TEMPLATE_ORIGINAL"
"""Environment variables of a raylet for its workers: address of the template, and Ray's own set-up script."""
JOB, RAYLET = "RAY_JOB_ID", "RAY_RAYLET_PID"
"""Environment variables that Ray's core reads at its import; workers end with the raylet's process."""
FIRST_JOB = "01000000"
"""The job of the driver that starts a Ray."""


class WorkerTemplate:
    """The template of one Ray, for the process that starts that Ray. socket: its address."""

    def __init__(
        self, *, folder: Path, threads: int = 1, variables: Mapping[str, str] | None = None, modules: Sequence[str] = ()
    ) -> None:
        """Start the template, which accepts requests once it has imported everything.

        folder: private to this user, see `short_folder`. threads: number for the libraries' arithmetic, unless
        OMP_NUM_THREADS is set. variables: environment of the expected job, whose process is made at once. modules:
        those of this package that all jobs use; none if a job may bring another version."""
        self.socket = folder / "template"
        environment = {
            "OMP_NUM_THREADS": str(max(1, threads)),
            **os.environ,
            SOCKET: str(self.socket),  # a mark of all processes of one Ray, these included
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket))
            listener.listen(256)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno()), json.dumps([variables, modules])],
                env=environment,
                stdin=subprocess.PIPE,  # its end tells that the driver is gone
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        """End the template and remove its folder; workers continue."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self.socket.parent, ignore_errors=True)


def short_folder() -> Path:
    """A new private folder for sockets, whose paths hold at most 107 characters."""
    return Path(tempfile.mkdtemp(prefix="sr-", dir=short_path()))


def is_possible() -> bool:
    """Whether this system can fork processes with these libraries; macOS's own libraries forbid it."""
    return sys.platform == "linux" and FORKED_WORKERS.is_possible()


def expect(place: str, variables: Mapping[str, str], modules: Sequence[str]) -> None:
    """Make the template that listens at this address create a job's process before its first worker is requested.
    variables: the job's environment. modules: imported for all its workers, from where this process finds them."""
    path = [os.path.abspath(folder) for folder in sys.path]
    about = {"environment": dict(variables), "prefix": sys.prefix, "arguments": [], "modules": modules, "path": path}
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # its workers are requested later
        connection.connect(place)
        with open(os.devnull, "r+b", buffering=0) as nothing:
            Request([nothing.fileno()] * 3, about).send(connection)


def raylet_here(address: str) -> int | None:
    """Process id of this user's raylet on this machine for the cluster at this address, if it starts workers with this
    Python; None if there is none, or more than one."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        if process.info["name"] != "raylet" or process.info["uids"].real != os.getuid():
            continue
        words = [word.removeprefix("--").partition("=") for word in process.info["cmdline"] or []]
        options = {name: value for name, _, value in words}
        interpreter = options.get("python_worker_command", "").partition(" ")[0]
        if interpreter in (sys.executable, plain_executable()) and _is_same(options.get("gcs-address", ""), address):
            found.append(process.pid)
    return found[0] if len(found) == 1 else None


def socket_of(raylet: int) -> str | None:
    """Address at which this raylet's template listens; None if its workers are fresh interpreters."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(raylet).environ().get(SOCKET) or None
    return None


def _is_same(listening: str, address: str) -> bool:
    """Whether the control store that listens there on this machine has this address."""
    if address == "auto" or listening == address:
        return True
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return listening.rpartition(":")[2] == port and (host.startswith("127.") or listening == f"{host}:{port}")


@dataclass(frozen=True)
class Request:
    """Request from a process that Ray started.

    files: descriptors, in this process, of the connection on which it waits and of its three standard streams; about:
    its arguments, environment, folder, niceness, and the paths of its Python and modules."""

    files: list[int]
    about: dict[str, Any]

    @classmethod
    def receive(cls, connection: socket.socket, files: int) -> Request:
        """Receive the next request, with this number of files. Raises OSError or ValueError if there is none."""
        head, found, _, _ = socket.recv_fds(connection, 4, files)
        content = bytearray(int.from_bytes(head, "big"))
        view = memoryview(content)
        while view and (count := connection.recv_into(view)):
            view = view[count:]
        return cls(found, json.loads(content))

    def send(self, connection: socket.socket) -> None:
        """Pass the request on. Raises OSError if no process takes it."""
        content = json.dumps(self.about).encode()
        socket.send_fds(connection, [len(content).to_bytes(4, "big")], self.files)
        connection.sendall(content)

    def close(self) -> None:
        """Close this process's copies of the files, which another process now holds."""
        for file in self.files:
            os.close(file)


def process_of_a_job(
    listener: socket.socket, expected: Mapping[str, str] | None
) -> tuple[socket.socket, dict[str, Any]]:
    """Start a process for each job and pass the job's requests to it. Returns only in such a process, with the socket
    of its requests and the first request. expected: environment of the first job. Ends when this process's parent is
    gone."""
    jobs: dict[str, socket.socket] = {}

    def start(environment: Mapping[str, str]) -> socket.socket | None:
        """Fork. Returns, in the child, the socket of its requests."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            for other in (ours, *jobs.values()):
                other.close()
            os.environ.update(environment)
            return theirs
        theirs.close()
        jobs[environment[JOB]] = ours
        if len(jobs) > MOST_JOBS:
            jobs.pop(next(iter(jobs))).close()  # it ends
        return None

    if expected and (requests := start(expected)):
        return requests, {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        with listener.accept()[0] as connection:  # whoever is not answered goes on as a process of its own
            try:
                request = Request.receive(connection, files=3)
            except (OSError, ValueError):
                continue
            request.files.insert(0, os.dup(connection.fileno()))
        environment = request.about["environment"]
        if JOB in environment and request.about["prefix"] == sys.prefix:
            if environment[JOB] not in jobs and (requests := start(environment)):
                request.close()
                return requests, request.about
            try:
                request.send(jobs[environment[JOB]])
            except OSError:  # that process is gone
                jobs.pop(environment[JOB]).close()
        request.close()


def worker(requests: socket.socket) -> Request:
    """Fork for each request and return the request in the child. Ends when no more requests can come."""
    while True:
        try:
            request = Request.receive(requests, files=4)
        except (OSError, ValueError):
            os._exit(0)
        if request.about["arguments"] and os.fork() == 0:  # without arguments, see `WorkerTemplate.expect`
            return request
        request.close()


def become(request: Request) -> None:
    """Turn this process into the requested one, up to its first line of code."""
    about = request.about
    connection, *streams = request.files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(about["environment"])
    with contextlib.suppress(OSError):
        if os.getpgid(int(os.environ[RAYLET])) != os.getpgrp():
            os.setpgid(0, 0)  # a raylet ends the group of a worker that has ended, unless it is the raylet's own
    os.chdir(about["folder"])
    os.nice(max(0, about["niceness"] - os.nice(0)))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = about["arguments"]
    ray = Path(sys.modules["ray"].__file__ or "").parent
    of_ray = {place: None for place in sys.path if Path(place).is_relative_to(ray)}  # what its import puts first
    sys.path[:] = [*of_ray, str(Path(sys.argv[0]).parent), *about["path"]]
    ray_settings.read_again()
    numpy = sys.modules["numpy"]
    numpy.random.seed()  # workers must not draw the same numbers
    _follow_threads()
    gc.enable()
    os.write(connection, b"1")  # it stays open as long as this process lives


def _follow_threads() -> None:
    """Set torch's number of threads to the task's OMP_NUM_THREADS, which Ray sets after torch has read it at its
    import."""
    import torch
    from ray._private import utils

    of_ray = utils.set_omp_num_threads_if_unset

    def set_threads() -> bool:
        is_changed: bool = of_ray()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return is_changed

    utils.set_omp_num_threads_if_unset = set_threads


def import_all(names: Sequence[str]) -> None:
    """Import these modules for all forked processes."""
    gc.disable()  # takes a tenth of the time of imports
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # collections of the children leave what they share alone


def import_ray(names: Sequence[str]) -> None:
    """Import these modules without drawing a random number in Ray's core: after a draw before the fork, all children
    would have the same random state and give their placement groups the same name."""
    ray_actor: Any = importlib.import_module("ray.actor")
    of_classes = ray_actor.ActorClassID

    class FromTheSystem:
        @staticmethod
        def from_random() -> Any:
            return of_classes(os.urandom(of_classes.size()))

    ray_actor.ActorClassID = FromTheSystem  # each class that Ray Train decorates gets one
    import_all(names)
    ray_actor.ActorClassID = of_classes


def children_draw_alike() -> bool:
    """Whether two children would get the same random numbers from Ray's core."""
    import ray

    drawn = []
    for _ in range(2):
        readable, writable = os.pipe()
        if os.fork() == 0:
            os.write(writable, ray.PlacementGroupID.of(ray.JobID.from_int(1)).binary())
            os._exit(0)
        os.close(writable)
        with open(readable, "rb") as answer:
            drawn.append(answer.read())
    return drawn[0] == drawn[1]


def main() -> None:
    """Run the template of all jobs, and in its forks the template of one job and each worker."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray's own processes: the driver answers Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    expected, modules = json.loads(sys.argv[2])
    import_all(LIBRARIES)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        requests, first = process_of_a_job(listener, expected)
    import_ray([*OF_A_JOB, *modules])
    if not modules:  # a job may bring another version of this package, which its workers must find
        package = ray_settings.__name__.partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        if first.get("modules"):  # that of the driver
            sys.path[:] = first["path"]
            with contextlib.suppress(ImportError):
                import_all(first["modules"])
    if children_draw_alike():
        sys.exit("forks of Ray would draw the same numbers")  # each worker is then what Ray would start
    with requests:
        request = worker(requests)
    become(request)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
