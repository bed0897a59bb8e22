"""A process that has imported what Ray's workers need, and becomes one of them by a fork: Ray itself starts each worker
as a fresh interpreter, in which torch, Ray and the training loop take 4 CPU seconds.

The driver starts it before anything else (`WorkerTemplate`), and `own_ray.py` lets the raylet run `as_fork.py` in place
of Ray's own worker script. Each such process sends its arguments, environment and streams here, and a copy of this
process runs Ray's script with them. Where that does not work, `as_fork.py` runs the script itself, as Ray would.

Run as a module, this file is the template: it has one thread, and its child is what a fresh process would be after
these imports. It must not touch a GPU.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.launch.cluster import ray_settings

PRELOADED = ("ray.train.torch", "scaleray.training.worker")
"""The latter brings torch's compiler, which every optimizer of torch imports when it is made."""
SCRIPT = Path(__file__).with_name("as_fork.py")
SOCKET = "WORKER_TEMPLATE_SOCKET"
ORIGINAL = "WORKER_TEMPLATE_ORIGINAL"
"""Environment variables of a raylet, for its workers: where the template listens, and the script that they replace."""
JOB = "01000000"
"""The first job of a Ray, which is the one of the driver that starts it."""


class WorkerTemplate:
    """The template of one Ray, as the driver sees it. socket: where it listens."""

    def __init__(self, threads: int) -> None:
        """Start it; it answers once it has imported everything. threads: of each worker, unless OMP_NUM_THREADS is set:
        Ray sets that for a fresh process, and here it is read before."""
        # AF_UNIX paths hold 107 characters; the folder is this user's alone
        self._folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp" if Path("/tmp").is_dir() else None))
        self.socket = self._folder / "template"
        environment = {
            "OMP_NUM_THREADS": str(max(1, threads)),
            **os.environ,
            # Ray's core reads these two when it is imported, and never again
            "RAY_JOB_ID": JOB,
            "RAY_RAYLET_PID": str(os.getpid()),  # workers end with that process; their raylet ends with this one
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # Ray lets workers import what the driver can
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket))
            listener.listen(256)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
                env=environment,
                stdin=subprocess.PIPE,  # its end tells that the driver is gone
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        """End the template; workers live on."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_possible() -> bool:
    """Whether a process with these libraries may be forked here: macOS's own libraries forbid it."""
    return sys.platform == "linux"


@dataclass(frozen=True)
class Request:
    """What a process that Ray started wants to be. streams: its standard streams, as this process holds them."""

    connection: socket.socket
    streams: list[int]
    about: dict[str, Any]

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """Raises OSError or ValueError for what cannot be done here."""
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            about = json.loads(file.read(int.from_bytes(head, "big")))
        request = cls(connection, streams, about)
        if len(streams) != 3 or about["environment"].get("RAY_JOB_ID", JOB) != JOB:
            request.close()
            raise ValueError("a worker of another job")
        return request

    def close(self) -> None:
        """Let go of what belongs to the child alone."""
        self.connection.close()
        for stream in self.streams:
            os.close(stream)


def serve(listener: socket.socket) -> Request | None:
    """Fork for each request: gives it, in the child. None, in the template, when the driver is gone."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        try:
            request = Request.receive(connection)
        except (OSError, ValueError):
            connection.close()  # whoever sent it goes on as a process of its own
            continue
        if os.fork() == 0:
            return request
        request.close()


def become(request: Request) -> None:
    """Make this process what the request says, up to its first line of code."""
    about = request.about
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["folder"])
    os.nice(max(0, about["niceness"] - os.nice(0)))
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = [os.environ[ORIGINAL], *about["arguments"]]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    ray_settings.read_again()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # workers must not draw the same numbers
    gc.enable()
    request.connection.sendall(b"1")
    request.connection.detach()  # stays open as long as this process lives


def preload() -> None:
    """Import what workers need, without a random number of Ray's core: whoever draws one before the fork has seeded the
    generator of every child, and their placement groups would have one name."""
    ray_actor: Any = importlib.import_module("ray.actor")
    of_classes = ray_actor.ActorClassID

    class FromTheSystem:
        @staticmethod
        def from_random() -> Any:
            return of_classes(os.urandom(of_classes.size()))

    ray_actor.ActorClassID = FromTheSystem  # each class that Ray Train decorates gets one
    gc.disable()  # takes a tenth of the time of imports
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # collections of the children leave what they share alone
    ray_actor.ActorClassID = of_classes


def children_draw_alike() -> bool:
    """Whether two children would get the same random numbers of Ray's core."""
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
    """The template, and then each of its children."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray's own processes: the driver answers Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    preload()
    if children_draw_alike():
        sys.exit("forks of Ray would draw the same numbers")  # each worker is then what Ray would start
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        request = serve(listener)
    if request is None:
        os._exit(0)
    become(request)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
