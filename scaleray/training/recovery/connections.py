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


class GroupConnections:
    """Connections of the groups that this process forms from now on. gloo listens at the address of one interface, for
    each group at a port of its own, and one side of each connection has accepted it there."""

    def __init__(self) -> None:
        self._listening_before = {entry.laddr for entry in _connections() if _is_listening(entry)}

    def close(self) -> None:
        """Close the connections that this process has accepted for the groups."""
        found = _connections()
        ports = {entry.laddr for entry in found if _is_listening(entry)} - self._listening_before
        for entry in found:
            if entry.raddr and entry.laddr in ports:
                # it may be closed already
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(entry.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[Any]:
    return psutil.Process().net_connections("tcp")


def _is_listening(entry: Any) -> bool:
    return entry.status == psutil.CONN_LISTEN and entry.laddr.ip not in WILDCARDS
