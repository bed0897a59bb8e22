"""The stores in which the workers of a process group find each other.

torch's own server listens on all interfaces, and does what anybody asks who reaches it. Workers that have a machine to
themselves meet in a file of this user's instead; those of several machines at a server that listens on the one address
by which the others know it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from scaleray.own_folder import own_folder

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class StorePlace:
    """Where a store is, as every worker may be told. file: its path; without one it listens at host:port."""

    host: str
    port: int = 0
    file: str = ""


PREFIX = "store-"
LEFT_AFTER_S = 86400.0

_listeners: dict[StorePlace, socket.socket] = {}
"""Ports of this process for stores that have not been opened yet: told to others before torch is imported here."""


class OwnedStore:
    """A place of a store that this process owns, given back with `close` or with the process."""

    close: Callable[[], object]

    def __init__(self, host: str) -> None:
        """host: address of this machine by which the other workers know it."""
        if is_loopback(host):
            _remove_leftovers(own_folder())
            folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=own_folder())
            self.place = StorePlace(host, file=str(Path(folder, "store")))
            self.close = weakref.finalize(self, _remove, folder)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            self.place = StorePlace(host, listener.getsockname()[1])
            _listeners[self.place] = listener
            self.close = weakref.finalize(self, _stop_listening, self.place)


def open_store(place: StorePlace, *, timeout: timedelta = timedelta(minutes=5)) -> dist.Store:
    """The store there; the process that owns it becomes its server, as long as the store lives.

    timeout: of connecting, and of reading what is not there yet.
    """
    import torch.distributed as dist

    if place.file:
        store = dist.FileStore(place.file, -1)
        store.set_timeout(timeout)
        return store
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
    """Whether no other machine can have this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _remove_leftovers(place: Path) -> None:
    """Remove the files of processes that were killed; those of a day ago, as another container may share the folder."""
    for folder in place.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            is_old = folder.stat().st_mtime < time.time() - LEFT_AFTER_S
            if is_old and owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _stop_listening(place: StorePlace) -> None:
    if listener := _listeners.pop(place, None):
        listener.close()
