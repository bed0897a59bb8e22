"""A holder stores checkpoint files in the memory of a process that does not train, for clients in other processes.

For each request a client sends a line of JSON, followed by the bytes of a file. The answer has the same form. A client
on the same node may write a file to the holder's memory itself, which takes less CPU."""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.memory_limits import free_memory

LONGEST_LINE = 2**16
PUT, GET, LIST, DELETE, DROP, RESERVE = "put", "get", "list", "delete", "drop", "reserve"
"""Requests: store a file, fetch a part of a file, list a folder, remove a file, remove a folder, reserve memory."""
OPEN, FINISH = "open", "finish"
"""Requests of a client on the same node: memory for a file, which the client then writes; store that file."""
MISSING = "missing"
"""Kind of error for a file that the holder does not have."""
REUSED_FROM = 2**20
"""Minimum size in bytes of a file whose buffer is reused: the system serves smaller ones from memory that it has."""
LEFT_FREE = 0.1
"""Share of the free memory that copies never use."""


class SharedMemory(mmap.mmap):
    """Memory of this process that other processes of the same user on this node can open at `path`, where `target` is
    the name of its file. Linux only. Unlike the standard library's, it is freed if the process is killed, and does not
    need /dev/shm, which is small in containers."""

    path: str
    target: str
    _descriptor: int

    def __new__(cls, length: int) -> SharedMemory:
        """Allocate zeroed memory."""
        name = f"scaleray-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        try:
            os.ftruncate(descriptor, length)
            self = super().__new__(cls, descriptor, length)
        except BaseException:
            os.close(descriptor)
            raise
        self.path, self.target = f"/proc/{os.getpid()}/fd/{descriptor}", f"/memfd:{name} (deleted)"
        self._descriptor = descriptor
        return self

    def __del__(self) -> None:
        """Close the file, which `path` refers to."""
        os.close(self._descriptor)


@dataclass
class _File:
    content: bytearray | SharedMemory
    is_read: bool = False
    changed_at: float = field(default_factory=time.time)


class Holder:
    """Files by name in this process's memory, with no more bytes in total than have been reserved.

    host: address of this machine for the clients. token: secret that each client must send. port: 0 takes any. The
    files exist until `close` or the end of the process."""

    def __init__(self, host: str, token: str, port: int = 0) -> None:
        self.token, self.asked_at = token, time.monotonic()
        self._files: dict[str, _File] = {}
        self._reserved: dict[str, int] = {}
        self._written: dict[str, bytearray | SharedMemory] = {}
        """Memory of files that clients are writing."""
        self._free: list[bytearray | SharedMemory] = []
        """Buffers of removed files, reused so that the system need not clear new memory for each file."""
        self._lock = threading.Lock()
        settings = {"address_family": family_of(host), "daemon_threads": True, "allow_reuse_address": True}
        server = type("Server", (socketserver.ThreadingTCPServer,), settings)
        self._server = server((host, port), _handler_of(self))
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="scaleray-holder", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(len(file.content) for file in self._files.values())

    def answer(self, request: dict[str, Any], read_into: Callable[[memoryview], None]) -> tuple[dict[str, Any], Any]:
        """Handle one request. Returns the answer and the bytes that follow it. read_into: fills a buffer with the bytes
        that follow the request."""
        self.asked_at, kind, name = time.monotonic(), request["kind"], request.get("name", "")
        if kind == PUT:
            answer = self._open(name, request["length"])
            if "error" not in answer:
                read_into(memoryview(self._written[name]))
                self._finish(name)
            return answer, b""
        if kind == OPEN:
            return self._open(name, request["length"]), b""
        if kind == FINISH:
            self._finish(name)
            return {}, b""
        if kind == GET:
            with self._lock:
                file = self._files.get(name)
                if file is None:
                    return {"error": f"{name} is not held", "why": MISSING}, b""
                file.is_read = True
            start, length = request["start"], request["length"]
            part = memoryview(file.content)[start : None if length is None else start + length]
            return {"length": len(part)}, part
        with self._lock:
            if kind == LIST:
                prefix = f"{name}/" if name else ""
                found = [(n, len(f.content), f.changed_at) for n, f in self._files.items() if n.startswith(prefix)]
                return {"files": sorted(found)}, b""
            if kind == RESERVE:
                return self._reserve(name, request["length"]), b""
            self._written.pop(name, None)
            for each in [n for n in self._files if n == name or (kind == DROP and n.startswith(f"{name}/"))]:
                self._remove(each)
            return {}, b""

    def give_up(self, name: str) -> None:
        """Forget a file whose client has gone before it was complete."""
        with self._lock:
            self._written.pop(name, None)  # not reused, as that client may still write to it

    def _open(self, name: str, length: int) -> dict[str, Any]:
        """Allocate memory for a file that a client writes. Returns how a process on this node opens it, if it can."""
        with self._lock:
            contents = {**{known: file.content for known, file in self._files.items()}, **self._written}
            held = sum(len(content) for known, content in contents.items() if known != name)
            limit = sum(self._reserved.values())
            if held + length > limit:
                full = f"{held} of {limit} bytes are in use, {length} more are needed"
                return {"error": f"the memory for copies is full: {full}"}
            fitting = next((index for index, buffer in enumerate(self._free) if len(buffer) == length), None)
            content = self._free.pop(fitting) if fitting is not None else None
            if content is None and held + length + sum(map(len, self._free)) > limit:
                self._free.clear()
            if content is None:
                is_shared = length >= REUSED_FROM and hasattr(os, "memfd_create")
                content = SharedMemory(length) if is_shared else bytearray(length)
            self._written[name] = content
        return {"path": content.path, "target": content.target} if isinstance(content, SharedMemory) else {}

    def _finish(self, name: str) -> None:
        """Store a file that is complete. Raises KeyError if there is none with this name."""
        with self._lock:
            content = self._written.pop(name)
            self._remove(name)
            self._files[name] = _File(content)

    def _remove(self, name: str) -> None:
        file = self._files.pop(name, None)
        # a reader may still send the bytes of one
        if file is not None and not file.is_read and len(file.content) >= REUSED_FROM:
            self._free.append(file.content)

    def _reserve(self, owner: str, num_bytes: int) -> dict[str, Any]:
        """Reserve memory for an owner, in place of its earlier reservation, if there is enough."""
        others = sum(length for name, length in self._reserved.items() if name != owner)
        held = sum(map(len, [*(file.content for file in self._files.values()), *self._free]))
        free = int((1 - LEFT_FREE) * free_memory()) + held - others
        if num_bytes > free:
            return {"free": max(0, free)}
        self._reserved[owner] = num_bytes
        return {}


def family_of(host: str) -> socket.AddressFamily:
    """Family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _handler_of(holder: Holder) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            self.opened: set[str] = set()
            try:
                hello = json.loads(self.rfile.readline(LONGEST_LINE))
                if not hmac.compare_digest(str(hello.get("token", "")), holder.token):
                    return
                while line := self.rfile.readline(LONGEST_LINE):
                    request = json.loads(line)
                    self.left = request["length"] if request["kind"] == PUT else 0
                    if request["kind"] in (PUT, OPEN):
                        self.opened.add(request["name"])
                    answer, content = holder.answer(request, self._read_into)
                    self._skip()
                    if request["kind"] in (PUT, FINISH):
                        self.opened.discard(request["name"])
                    self.wfile.write(json.dumps(answer).encode() + b"\n")
                    if len(content):
                        self.wfile.write(content)
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                pass  # the client has gone, or is none
            finally:
                for name in self.opened:
                    holder.give_up(name)

        def _read_into(self, buffer: memoryview) -> None:
            filled = 0
            while filled < len(buffer):
                count = self.rfile.readinto(buffer[filled:])
                if not count:
                    raise ConnectionError("the client has gone")
                filled += count
            self.left -= filled

        def _skip(self) -> None:
            """Read and discard the bytes of a refused file, which the client has sent nevertheless."""
            while self.left > 0:
                self._read_into(memoryview(bytearray(min(self.left, 2**20))))

    return Handler
