"""The TCP connections of gloo's process groups, which a worker closes when another one is lost.

A collective of gloo ends when one of its own connections does, and a group that is destroyed waits for its collectives:
two survivors would wait for each other. `ProcessGroupGloo.abort()` of torch 2.13 ends neither."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import psutil

WILDCARDS = ("0.0.0.0", "::")
NO_TIMEOUT = bytes(16)  # of a struct timeval


class GroupConnections:
    """Connections of the groups that this process forms from now on. gloo listens at the address of one interface, for
    each group at a port of its own, and gives its connections a timeout for receiving, as nothing else does. Both ends
    close them: that of a worker that cannot be reached never comes to an end at the other one."""

    def __init__(self) -> None:
        found = _connections()
        self._before = {(entry.laddr, entry.raddr) for entry in found}
        self._listening_before = {entry.laddr for entry in found if _is_listening(entry)}

    def close(self) -> bool:
        """Close the connections of the groups; returns whether all of a group had ended before."""
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
