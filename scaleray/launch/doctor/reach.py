"""Whether nodes reach each other's ports: each listens on one that its system hands out, and the others connect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

CONNECT_S = 3.0
MOST_AT_ONCE = 64


class Listener:
    """A port of this node that takes connections and closes them at once, until it is closed itself."""

    def __init__(self, host: str) -> None:
        """host: address by which other nodes know this one."""
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.place: tuple[str, int] = (host, self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="scaleray-doctor-port", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        # accept() in the thread would otherwise hold the port until somebody connects
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return


def unreachable(places: Mapping[str, tuple[str, int]]) -> list[str]:
    """Names of those places that do not take a connection from here."""

    def is_open(place: tuple[str, int]) -> bool:
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
        except OSError:
            return False
        return True

    if not places:
        return []
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(places))) as pool:
        opened = pool.map(is_open, places.values())
    return [name for name, found in zip(places, opened, strict=True) if not found]
