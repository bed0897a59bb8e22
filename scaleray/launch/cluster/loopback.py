"""Restrict a Ray to this machine: all its processes listen on 127.0.0.1, which no other host can reach.

Ray itself replaces 127.0.0.1 by an address that other hosts can reach, and then listens on all interfaces. On Windows
and macOS Ray stays on loopback by default; `VARIABLE` is its own switch for that. This module overrides the function by
which Ray finds this machine's address (see `scaleray/common/private_parts.py`); if that fails, Ray listens as usual."""

import contextlib
import os
import socket
from collections.abc import Iterator

from scaleray.common.private_parts import LOOPBACK
from scaleray.errors import UsageError
from scaleray.launch.cluster import token

ADDRESS = "127.0.0.1"
VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's environment variable: with 0 its processes stay on loopback; 1, set by the user, opens a local Ray to other
hosts."""
LOOK_TIMEOUT_S = 2.0
NAMES = (ADDRESS, "localhost", "::1", "[::1]")
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Environment variables that list hosts to reach without a proxy; libraries differ in which one they read first."""


def is_wanted() -> bool:
    """Whether a Ray started here should stay on loopback, which is the default."""
    return os.environ.get(VARIABLE, "0") != "1"


def is_kept() -> bool:
    """Whether a Ray started here stays on loopback: it should, and this release of Ray supports it."""
    return is_wanted() and LOOPBACK.is_used()


def refuse_open() -> None:
    """Raise UsageError if a Ray started here would let other hosts run code without a token."""
    if os.environ.get(token.MODE, "").lower() == "disabled" and not is_kept():
        raise UsageError(
            token.MODE if is_wanted() else f"{VARIABLE} with {token.MODE}",
            "disabled" if is_wanted() else "1 and disabled",
            "a Ray that other hosts can reach must require a token, since they could run code here otherwise",
            f"unset {token.MODE} to use a token"
            + ("" if is_wanted() else f", or unset {VARIABLE} to keep Ray on this machine"),
        )


def ask_directly() -> None:
    """Bypass proxies for loopback in this process and its children; a proxy would receive the token."""
    if not any(name.lower().endswith("_proxy") and name not in NO_PROXY for name in os.environ):
        return  # a lone no_proxy would hide a system's own settings of proxies
    given = next((os.environ[name] for name in NO_PROXY if os.environ.get(name)), "")
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    if "*" in hosts:
        return
    wanted = ",".join([*hosts, *(name for name in NAMES if name not in hosts)])
    os.environ.update(dict.fromkeys(NO_PROXY, wanted))


@contextlib.contextmanager
def staying_local() -> Iterator[None]:
    """Make Ray in this process use 127.0.0.1 as the machine's address while it starts or reaches nodes on loopback."""
    if not is_kept():
        yield
        return
    import ray._private.services as services
    import ray.util

    before = services.get_node_ip_address, ray.util.get_node_ip_address
    services.get_node_ip_address = ray.util.get_node_ip_address = lambda address=None: ADDRESS
    try:
        yield
    finally:
        services.get_node_ip_address, ray.util.get_node_ip_address = before


@contextlib.contextmanager
def reaching(address: str) -> Iterator[None]:
    """Let Ray in this process connect to a cluster at this address even if it listens only on loopback."""
    if not is_on_loopback_alone(address):
        yield
        return
    with staying_local():
        yield


def is_on_loopback_alone(address: str) -> bool:
    """Whether host:port is on loopback, and the same port of this machine's own address is closed."""
    host, _, port = address.rpartition(":")
    if host not in (ADDRESS, "localhost") or not port.isdigit():
        return False
    import ray.util

    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=LOOK_TIMEOUT_S).close()
    except OSError:
        return True
    return ray.util.get_node_ip_address() == ADDRESS
