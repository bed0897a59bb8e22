"""Network namespaces on this machine: a process in one has a link of its own, which can be cut or slowed.

The ports of a bridge in the namespace of this process. It needs root and the program `ip`; nothing outside is touched."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from typing import Any

CLONE_NEWNET = 0x40000000
SUBNET = "10.77"
INTERFACE = "eth0"


def leave_network() -> None:
    """Give this process an empty network of its own. Call it before there are threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")


def can_cut() -> bool:
    """Whether this process may make network namespaces."""
    programs = all(shutil.which(name) for name in ("ip", "bridge", "tc", "nsenter"))
    return os.geteuid() == 0 and programs


class Links:
    """A bridge, and a link to it for each process that joins."""

    def __init__(self) -> None:
        leave_network()
        _run("ip", "link add br0 type bridge\nlink set br0 up\nlink set lo up")
        self._ports: dict[int, int] = {}
        self._last = 0

    def begin(self) -> None:
        """Forget the processes of an earlier training; the system removes their links when it comes to it."""
        self._ports = {}

    def address(self, number: int) -> str:
        """Address of a process, by number."""
        port = self._port(number)
        return f"{SUBNET}.{port // 250}.{port % 250 + 1}"

    def join(self, number: int, pid: int) -> None:
        """Give a process that has left the network a link under its number."""
        port = f"p{self._port(number)}"
        _run("ip", f"link add {port} type veth peer name {INTERFACE} netns {pid}\nlink set {port} master br0 up")
        inside = f"addr add {self.address(number)}/16 dev {INTERFACE}\nlink set {INTERFACE} up\nlink set lo up"
        _run("nsenter", inside, "-t", str(pid), "-n", "ip", "-batch", "-")

    def cut(self, number: int) -> None:
        """Cut a process off: what is sent to it or by it is lost, and no connection is closed."""
        _run("ip", f"link set p{self._port(number)} nomaster")

    def cut_between(self, first: int, second: int) -> None:
        """Cut the link between two processes; both reach all others."""
        for number in (first, second):
            _run("bridge", f"link set dev p{self._port(number)} isolated on")

    def slow(self, number: int, mbit_s: float) -> None:
        """Limit what a process receives, in Mbit/s."""
        limit = f"rate {mbit_s}mbit burst 16kb latency 2000ms"
        _run("tc", f"qdisc replace dev p{self._port(number)} root tbf {limit}")

    def heal(self, number: int) -> None:
        """End all troubles of a link."""
        port = f"p{self._port(number)}"
        _run("ip", f"link set {port} master br0")
        _run("bridge", f"link set dev {port} isolated off")
        _run("tc", f"qdisc delete dev {port} root", is_lenient=True)

    def _port(self, number: int) -> int:
        if number not in self._ports:
            self._last += 1
            self._ports[number] = self._last
        return self._ports[number]


def _run(program: str, commands: str, *arguments: str, is_lenient: bool = False) -> None:
    command = [program, *(arguments or ("-batch", "-"))]
    done: Any = subprocess.run(command, input=commands + "\n", capture_output=True, text=True, check=False)
    if done.returncode and not is_lenient:
        raise OSError(f"{' '.join(command)} has failed on {commands!r}: {done.stderr.strip()}")
