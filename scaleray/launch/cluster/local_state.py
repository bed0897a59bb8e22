"""State of the clusters that this user has started on this machine, and their living processes.

Each cluster has a folder inside this user's private folder, with a state file of mode 0600 next to Ray's own files."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
from pydantic import ConfigDict, TypeAdapter

from scaleray.common.own_folder import own_folder, short_path
from scaleray.errors import ClusterError, UsageError

PREFIX = "c-"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,11}")
"""Allowed cluster names, which are short because paths of Ray's sockets may have at most 107 characters."""
MARK = "CLUSTER_OF_SCALERAY"
"""Environment variable of all processes of a cluster: a random number that identifies unlisted processes."""
SAME_START_S = 1.0
"""Maximum difference in seconds between two readings of a process's start time, which depend on the system's clock."""
AS_SAVED = ConfigDict(extra="forbid", strict=True)
GRACE_S = 20.0
"""Seconds between asking a node to end and SIGKILL; its guard ends its descendants within ten."""


@dataclass(frozen=True)
class NodeState:
    """A node that was started. pid, started_at: of its root process. log: its output."""

    name: str
    pid: int
    started_at: float
    log: str
    __pydantic_config__: ClassVar = AS_SAVED

    @property
    def is_running(self) -> bool:
        """Whether this process is alive, rather than another one with the same process id."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """The living process; None if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started_at) < SAME_START_S and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


@dataclass(frozen=True)
class ClusterState:
    """A cluster that was started. mark: its random number. cpus: of each node, as Ray counts them."""

    name: str
    mark: str
    address: str
    dashboard: str
    cpus: int
    nodes: tuple[NodeState, ...] = ()
    __pydantic_config__: ClassVar = AS_SAVED

    @property
    def folder(self) -> Path:
        """Folder of the cluster's files."""
        return folder_of(self.name)

    def save(self) -> None:
        """Save the state for `load`, readable only by this user."""
        part = self.folder / "state.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as output:
            json.dump(dataclasses.asdict(self), output, indent=1)
        part.replace(self.folder / "state.json")

    def left(self) -> list[psutil.Process]:
        """All living processes of the cluster: its nodes, and marked processes whose node is gone."""
        found = {process for node in self.nodes if (process := node.process()) is not None}
        return list(found | marked_processes(MARK, self.mark))

    def end(self) -> int:
        """End all remaining processes of the cluster and remove its files. Returns the number of nodes that were
        running."""
        running = [process for node in self.nodes if (process := node.process()) is not None]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()  # a guard, which ends what is below it
        psutil.wait_procs(running, timeout=GRACE_S)
        while left := self.left():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        return len(running)


def marked_processes(name: str, value: str) -> set[psutil.Process]:
    """Living processes with this variable in their environment, and all their descendants, since Ray's agents and
    workers overwrite their environment with their titles."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if _is_alive(process)}


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def folder_of(name: str) -> Path:
    """Folder of a cluster's files, which may not exist yet. Raises UsageError."""
    if not NAME.fullmatch(name):
        raise UsageError("NAME", name, "a cluster's name has at most 12 characters from a-z, 0-9 and -", "such as mine")
    return _place() / f"{PREFIX}{name}"


def new_folder(name: str) -> Path:
    """Create the folder of a cluster. Raises ClusterError if one of this name exists."""
    folder = folder_of(name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as exc:
        raise ClusterError(
            "NAME",
            name,
            "a cluster with this name is running or starting",
            f"scaleray cluster status shows it, scaleray cluster down {name} ends it; a second one needs another name",
        ) from exc
    return folder


def load(name: str) -> ClusterState | None:
    """Load the cluster of this name; None if there is none."""
    try:
        content = (folder_of(name) / "state.json").read_bytes()
        return _checked(TypeAdapter(ClusterState).validate_json(content), name)
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise ClusterError(
            str(folder_of(name) / "state.json"),
            "not readable",
            f"it must list the processes of a cluster ({' '.join(str(exc).splitlines()[1:3]) or exc})",
            "if another release of scaleray wrote it, end the cluster with that release",
        ) from exc


def _checked(state: ClusterState, name: str) -> ClusterState:
    """Return the state if it is valid and cannot identify foreign processes. Raises ValueError."""
    if state.name != name or not re.fullmatch("[0-9a-f]+", state.mark):
        raise ValueError(f"its name is {state.name!r} and its mark {state.mark!r}")
    if wrong := [node.pid for node in state.nodes if node.pid < 1]:
        raise ValueError(f"{wrong[0]} is not a process id")
    return state


def names() -> Iterator[str]:
    """Names of this user's clusters on this machine."""
    for folder in sorted(_place().glob(f"{PREFIX}*")):
        if NAME.fullmatch(folder.name.removeprefix(PREFIX)):
            yield folder.name.removeprefix(PREFIX)


def _place() -> Path:
    """This user's private folder, which every later command must find. Raises ClusterError if another user owns its
    name."""
    found = own_folder()
    if hasattr(os, "getuid") and found != short_path() / f"scaleray-{os.getuid()}":
        with contextlib.suppress(OSError):  # something else of this user is in it
            found.rmdir()
        raise ClusterError(
            str(short_path() / f"scaleray-{os.getuid()}"),
            "owned by another user",
            "it must hold the list of this user's clusters",
            "its owner or root can remove it",
        )
    return found
