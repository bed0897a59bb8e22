"""Several machines on this one, for tests of several nodes: `cluster/local/machines.sh` makes them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from scaleray.common.guarded import guarded

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "cluster" / "local" / "machines.sh"
_counter = itertools.count()


@dataclass(frozen=True)
class Machine:
    """One of them, with an address, processes and a /tmp of its own. first: the process that all its others are below,
    network: the name of what joins it with the others."""

    name: str
    address: str
    first: int
    network: str

    def command(self, words: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """The command line that runs these words there, in a folder that it sees; without one in its root."""
        inside = [] if folder is None else ["env", "-C", str(folder)]  # nsenter leaves the folder that it is called in
        return ["nsenter", "--target", str(self.first), "--net", "--pid", "--mount", "--uts", *inside, *words]

    def received_bytes(self) -> int:
        """How much has come to it over its link so far."""
        return int(Path(f"/sys/class/net/{self.network}{self.name}/statistics/tx_bytes").read_text())

    def is_on(self) -> bool:
        """Whether it has not been switched off."""
        try:
            stat = Path(f"/proc/{self.first}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"  # ended, and its parent has not asked how

    def limit(self, rate: str) -> None:
        """Let its link pass no more than this in each direction, such as `200mbit`, from now on."""
        self.lift_limit()
        bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        for end, device in self.ends():
            subprocess.run([*end, "add", "dev", device, "root", *bucket], check=True)

    def lift_limit(self) -> None:
        """Let its link be as fast as it can."""
        for end, device in self.ends():
            subprocess.run([*end, "delete", "dev", device, "root"], capture_output=True)

    def held_back(self) -> list[int]:
        """How many packets its limited link has let wait, in each direction."""
        told = [
            subprocess.run(["tc", "-s", *end[1:], "show", "dev", device], capture_output=True, text=True, check=True)
            for end, device in self.ends()
        ]
        return [
            int(found[1]) for one in told if (found := re.search(r"qdisc tbf.*?overlimits (\d+)", one.stdout, re.S))
        ]

    def ends(self) -> list[tuple[list[str], str]]:
        """The commands and devices of the two ends of its link: what comes to it, and what it sends."""
        here = ["tc", "-n", f"{self.network}-{self.name}", "qdisc"]
        return [(["tc", "qdisc"], f"{self.network}{self.name}"), (here, "eth0")]

    def end_processes(self) -> None:
        """End all its processes but the first."""
        subprocess.run(self.command(["kill", "-KILL", "-1"]))

    def switch_off(self) -> None:
        """End all its processes at once, as a lost machine would."""
        os.kill(self.first, signal.SIGKILL)


@contextlib.contextmanager
def machines(number: int, shared: Path) -> Iterator[list[Machine]]:
    """So many machines, which see this folder at the same path; gone with the context, or with this process.

    Skips the test, with the reason, where none can be made. What is outside of /tmp they see as well, so that scaleray
    and its environment must lie there.
    """
    if hidden := [path for path in (ROOT, Path(sys.prefix)) if path.resolve().is_relative_to("/tmp")]:
        pytest.skip(f"{hidden[0]} lies in /tmp, and each machine has a /tmp of its own: take it from another folder")
    place = os.getpid() * 7 + next(_counter)
    name = f"m{place % 10**7}"
    command = [str(SCRIPT), name, f"10.{200 + place % 13}.{place % 251}", str(number), str(shared)]
    process = subprocess.Popen(guarded(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            if line == "ready\n":
                break
            lines.append(line.strip())
        else:
            if process.wait(timeout=60) == 75:
                pytest.skip(lines[-1].removeprefix("skipped: "))
            raise AssertionError(f"no machine: exit code {process.returncode}")
        words = [line.split() for line in lines]
        yield [Machine(each, address, int(first), name) for each, address, first in words]
    finally:
        process.stdin.close()  # it waits for that
        process.wait(timeout=60)
        process.stdout.close()
