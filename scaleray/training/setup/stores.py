"""Stores through which the workers of a process group find each other.

torch's own server listens on all interfaces and serves every client that can reach it. This one listens only on the
address that the other workers use, which is loopback if all of them are on this machine."""

from __future__ import annotations

import ipaddress
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class StorePlace:
    """Address of a store, in a form that can be sent to every worker."""

    host: str
    port: int


_listeners: dict[StorePlace, socket.socket] = {}
"""Ports reserved for stores that have not been opened yet; sent to other processes before torch is imported here."""


class OwnedStore:
    """Address of a store that this process owns. It is released by `close` or at exit, unless the store was opened."""

    close: Callable[[], object]

    def __init__(self, host: str) -> None:
        """host: address of this machine for the other workers."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.place = StorePlace(host, listener.getsockname()[1])
        _listeners[self.place] = listener
        self.close = weakref.finalize(self, _stop_listening, self.place)


def open_store(place: StorePlace, *, timeout: timedelta = timedelta(minutes=5)) -> dist.Store:
    """Open the store at an address. In the process that owns it, the first call creates the server, which lives as long
    as the result. timeout: for connecting, and for reading keys that do not exist yet."""
    import torch.distributed as dist

    listener = _listeners.pop(place, None)
    if listener is None:
        return dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    return dist.TCPStore(
        place.host,
        place.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_listening(place: StorePlace) -> None:
    if listener := _listeners.pop(place, None):
        listener.close()
