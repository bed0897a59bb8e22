"""The TCP connections of gloo's process groups, which a worker closes when another one is lost.

A gloo collective ends when one of its own connections ends, and destroying a group waits for its collectives, so two
survivors would wait for each other. `ProcessGroupGloo.abort()` of torch 2.13 ends neither."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import psutil

WILDCARDS = ("0.0.0.0", "::")
NO_TIMEOUT = bytes(16)  # of a struct timeval


class GroupConnections:
    """Connections of the groups that this process forms from now on. They are recognised because gloo listens on the
    address of one interface, at a separate port for each group, and is alone in giving its connections a receive
    timeout. Both ends close them, since a connection to an unreachable worker never ends by itself."""

    def __init__(self) -> None:
        found = _connections()
        self._before = {(entry.laddr, entry.raddr) for entry in found}
        self._listening_before = {entry.laddr for entry in found if _is_listening(entry)}

    def close(self) -> bool:
        """Close the connections of the groups. Returns whether all connections of a group had ended before."""
        found, is_open = _connections(), False
        ports = {entry.laddr for entry in found if _is_listening(entry)} - self._listening_before
        for entry in found:
            if not entry.raddr or (entry.laddr, entry.raddr) in self._before:
                continue
            # it may be closed already
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(entry.fd)) as connection:
                timeout = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(NO_TIMEOUT))
                if entry.laddr in ports or timeout != NO_TIMEOUT:
                    is_open = True
                    connection.shutdown(socket.SHUT_RDWR)
        return bool(ports) and not is_open


def _connections() -> list[Any]:
    return psutil.Process().net_connections("tcp")


def _is_listening(entry: Any) -> bool:
    return entry.status == psutil.CONN_LISTEN and entry.laddr.ip not in WILDCARDS
