"""Checkpoint files in the memory of holders, with the interface of a store, and the choice of holders for each node's
files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import xxhash

from scaleray.checkpoints.catalog import Catalog, Pruned
from scaleray.checkpoints.damage import Damage
from scaleray.checkpoints.holder import DELETE, DROP, FINISH, GET, LIST, MISSING, OPEN, PUT, RESERVE
from scaleray.checkpoints.manifest import FILE_NAME, Damaged, Incomplete, Manifest, step_of
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.storage import PIECE_BYTES, Entry, Store

SCHEME = "memory://"
TIMEOUT_S, CONNECT_S = 10.0, 2.0
"""Time limits in seconds for an answer from a holder, and for a connection."""
RETRY_S = 10.0
"""Seconds to wait after a failed connection before the next attempt, so that a lost node does not delay each
request."""


@dataclass(frozen=True)
class MemoryStore(Store):
    """Files in a holder. root: `memory://HOST:PORT`. token: the holder's secret. is_here: whether the holder is on this
    node, so that files are written to its memory if the system allows it. Hashes are xxh3-128, which detects damage;
    protection against changes comes from the secret."""

    token: str = field(default="", repr=False, compare=False)
    is_here: bool = field(default=False, compare=False)

    @classmethod
    def at(cls, host: str, port: int, token: str, *, is_here: bool = False) -> MemoryStore:
        """The files of the holder at this address."""
        return cls(f"{SCHEME}{f'[{host}]' if ':' in host else host}:{port}", token, is_here)

    @cached_property
    def _link(self) -> _Link:
        host, _, port = self.root.removeprefix(SCHEME).rpartition(":")
        return _Link(host.strip("[]"), int(port), self.token)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "token": self.token, "is_here": self.is_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def reserve(self, owner: str, num_bytes: int) -> int | None:
        """Reserve memory for an owner's files. Returns None, or the number of free bytes if they do not suffice."""
        free: int | None = self._ask(RESERVE, name=owner, length=num_bytes)[0].get("free")
        self._link.reserved = (owner, num_bytes) if free is None else None
        return free

    def write(self, name: str, pieces: Iterable[Any], *, known: str = "") -> tuple[str, int]:
        """Send buffers as one file, which appears once it is complete. Returns its hash and number of bytes."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        digest, length = xxhash.xxh3_128(), sum(map(len, views))
        for view in views if not known else ():
            digest.update(view)
        if not (self.is_here and self._write_here(name, views, length)):
            self._ask(PUT, name=name, length=length, content=views)
        return known or digest.hexdigest(), length

    def _write_here(self, name: str, views: list[memoryview], length: int) -> bool:
        """Write a file to the holder's memory. Returns False if the system does not allow it."""
        answer = self._ask(OPEN, name=name, length=length)[0]
        try:
            descriptor = os.open(answer["path"], os.O_WRONLY)
        except (KeyError, OSError):
            return False
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") != answer["target"]:  # of another process, in a container
                return False
            position = 0
            for view in views:
                while view:
                    count = os.pwrite(descriptor, view, position)
                    position, view = position + count, view[count:]
        except OSError:  # such as too little memory
            self.delete(name)
            raise
        finally:
            os.close(descriptor)
        self._ask(FINISH, name=name)
        return True

    def read(self, name: str) -> bytes:
        """Content of a file. Raises FileNotFoundError or another OSError."""
        return bytes(self._ask(GET, name=name, start=0, length=None)[1])

    def open(self, name: str) -> BinaryIO:
        """Fetch a file and open it for seeking and reading."""
        return io.BytesIO(self.read(name))

    def digest(self, name: str) -> tuple[str, int]:
        """Hash and number of bytes of a file's current content."""
        content = self.read(name)
        return xxhash.xxh3_128_hexdigest(content), len(content)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill a buffer with a file's bytes from `start` on. Raises OSError, also if the file ends too early."""
        self._ask(GET, name=name, start=start, length=len(target), into=target)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""
        folder = name.rpartition("/")[0]
        return next((entry.num_bytes for entry in self.entries(folder) if entry.name == name), None)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders in `folder`, relative to the root."""
        depth = folder.count("/") + 1 if folder else 0
        return sorted({"/".join(entry.name.split("/")[: depth + 1]) for entry in self.entries(folder)})

    def entries(self, folder: str) -> list[Entry]:
        """Files in `folder` and below it, sorted by name."""
        return [Entry(*entry) for entry in self._ask(LIST, name=folder)[0]["files"]]

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        self._ask(DELETE, name=name)

    def delete_folder(self, name: str) -> None:
        """Remove a folder with all of its contents, if it exists."""
        self._ask(DROP, name=name)

    def _ask(self, kind: str, **request: Any) -> tuple[dict[str, Any], memoryview]:
        content, into = request.pop("content", ()), request.pop("into", None)
        answer, received = self._link.ask({"kind": kind, **request}, content, into)
        if answer.get("why") == MISSING:
            raise FileNotFoundError(f"{self.path(request['name'])} is not held")
        if "error" in answer:
            raise OSError(f"{self.root}: {answer['error']}")
        if into is not None and len(received) < len(into):
            raise OSError(f"{self.path(request['name'])} ends {len(into) - len(received)} bytes too early")
        return answer, received


class _Link:
    """Connection to a holder, for one request at a time."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address, self._token = (host, port), token
        self._lock = threading.Lock()
        self.reserved: tuple[str, int] | None = None
        """Owner and bytes of the reservation, for a holder that takes the place of the one that made it."""
        self._stream: Any = None
        self._failed_at = -math.inf

    def ask(
        self, request: dict[str, Any], content: Iterable[memoryview], into: memoryview | None
    ) -> tuple[dict[str, Any], memoryview]:
        """Send a request followed by bytes. Returns the answer and the bytes that follow it, in `into` if there is
        room. Raises OSError."""
        with self._lock:
            try:
                if self._stream is None:
                    connection = self._connected()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._socket, self._stream = connection, connection.makefile("rb")
                    connection.sendall(json.dumps({"token": self._token}).encode() + b"\n")
                    if self.reserved is not None:
                        again = {"kind": RESERVE, "name": self.reserved[0], "length": self.reserved[1]}
                        connection.sendall(json.dumps(again).encode() + b"\n")
                        self._stream.readline()
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                for view in content:
                    self._socket.sendall(view)
                answer = json.loads(self._stream.readline())
                length = answer.get("length", 0)
                if into is None:
                    into = memoryview(bytearray(length))
                elif length > len(into):
                    raise OSError(f"{length} bytes instead of {len(into)}")
                received, filled = into[:length], 0
                while filled < length:
                    count = self._stream.readinto(received[filled : filled + PIECE_BYTES])
                    if not count:
                        raise ConnectionError("the holder has gone")
                    filled += count
                return answer, received
            except (OSError, ValueError) as exc:  # an empty answer is no JSON
                self._close()
                raise OSError(f"the holder at {self._address[0]}:{self._address[1]} does not answer: {exc}") from exc

    def _connected(self) -> socket.socket:
        if time.monotonic() - self._failed_at < RETRY_S:
            raise OSError("the last attempt failed a moment ago")
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
        except OSError:
            self._failed_at = time.monotonic()
            raise
        connection.settimeout(TIMEOUT_S)
        return connection

    def _close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
                self._socket.close()
        self._stream = None


@dataclass(frozen=True)
class Generations(Catalog):
    """States in the memory of several nodes. Each file is in some of the stores. Only the newest complete state is
    kept, and the one being written.

    written: stores to which new states are written, and which have their manifests; by default all."""

    written: Sequence[Store] = ()
    _lost: set[str] = field(default_factory=set, compare=False)

    def found(self) -> tuple[list[Manifest], list[Damage]]:
        """All manifests, newest first, and damage to others. A step may have several manifests, the oldest of which are
        from attempts that were repeated."""
        manifests: dict[str | None, Manifest] = {}
        damages = []
        for store in self.stores:
            with contextlib.suppress(OSError):  # of a node that is lost
                names = [entry.name for entry in store.entries("") if entry.name.endswith(f"/{FILE_NAME}")]
                for name in names:
                    step = step_of(name.partition("/")[0])
                    try:
                        manifest = Manifest.from_json(store.read(name), where=store.path(name))
                        if manifest.step != step:
                            raise Damaged(f"it is that of step {manifest.step}")
                    except Incomplete as exc:
                        damages.append(Damage(store.path(name), str(exc)))
                    else:
                        manifests[manifest.sha256] = manifest
        return sorted(manifests.values(), key=lambda m: (m.step, m.created_at), reverse=True), damages

    def check(self, manifest: Manifest, files: Iterable[str] | None = None, *, heal: bool = True) -> list[Damage]:
        """See `Catalog.check`. A file that a store lacks does not count as damage as long as another store has it."""
        found = super().check(manifest, files, heal=False)
        return [each for each in found if each.is_lost or not (each.is_missing or each.is_unreadable)]

    def publish(self, manifest: Manifest) -> list[str]:
        """See `Catalog.publish`. A lost store is reported once."""
        problems = Catalog(list(self.written) or self.stores).publish(manifest)
        new = [problem for problem in problems if problem.partition(": ")[0] not in self._lost]
        self._lost.update(problem.partition(": ")[0] for problem in new)
        return new

    def prune(
        self, retention: Retention, *, newest: int | None = None, spared_s: float = 0.0, is_dry_run: bool = False
    ) -> Pruned:
        """Remove all states except that of step `newest` from the stores to which new ones are written."""
        for store in self.written or self.stores:
            with contextlib.suppress(OSError):
                for name in store.names():
                    if step_of(name) != newest:
                        store.delete_folder(name)
        return Pruned([], 0)


def homes(domains: Mapping[str, str], copies: int) -> dict[str, tuple[str, ...]]:
    """Nodes to which each node's files go: itself and others of its group, in different failure domains if possible.
    With groups, a file is lost less often than with a ring, because fewer pairs of lost nodes have all copies of a
    file.

    domains: failure domain of each node."""
    of_domain: dict[str, list[str]] = {}
    for node in sorted(domains):
        of_domain.setdefault(domains[node], []).append(node)
    queues = [list(nodes) for nodes in of_domain.values()]
    order: list[str] = []
    while any(queues):
        queues.sort(key=len, reverse=True)  # stable: the largest domains first, so that none is left over alone
        for queue in queues[: max(1, copies)]:
            order += queue[:1]
            del queue[:1]
    groups = [order[start : start + copies] for start in range(0, len(order), copies)]
    if len(groups) > 1 and len(groups[-1]) < copies:
        groups[-2:] = [groups[-2] + groups[-1]]
    found = {}
    for group in groups:
        for place, node in enumerate(group):
            others = group[place + 1 :] + group[:place]
            others.sort(key=lambda other: domains[other] == domains[node])
            found[node] = (node, *others[: copies - 1])
    return found
