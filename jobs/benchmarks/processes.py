"""CPU seconds of a command's processes while it runs, by what each process is: load moves wall time, not these."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

EVERY_S = 0.2
NAMED_EVERY = 20  # samples
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """CPU seconds since each process began, by process id, at one wall clock; `machine_s`: busy seconds of all cores."""

    at: float
    cpu_s: dict[int, float]
    machine_s: float


class CpuWatch:
    """Samples the descendants of a process in a thread, as long as the context lasts.

    A process that lives shorter than the interval is missed; its parent's own time is not.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[Sample] = []
        self.names: dict[int, str] = {}
        self.most_bytes: dict[int, int] = {}
        """Largest resident memory of each process, of those moments at which it was named."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu-watch", daemon=True)

    def __enter__(self) -> CpuWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def cpu_s(self, since: float = 0.0, until: float = float("inf")) -> dict[str, float]:
        """CPU seconds between two wall clocks by name of process, the most expensive first."""
        found: dict[str, float] = defaultdict(float)
        known: dict[int, float] = {}
        for sample in self.samples:
            for pid, seconds in sample.cpu_s.items():
                if since < sample.at <= until:
                    found[self.names[pid]] += seconds - known.get(pid, 0.0)
                known[pid] = seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def foreign_s(self, since: float = 0.0, until: float = float("inf")) -> float:
        """CPU seconds that the machine spent on other processes between two wall clocks."""
        inside = [sample for sample in self.samples if since < sample.at <= until]
        if len(inside) < 2:
            return 0.0
        busy = inside[-1].machine_s - inside[0].machine_s
        return max(0.0, busy - sum(self.cpu_s(inside[0].at, inside[-1].at).values()))

    def peak_bytes(self, name: str) -> int:
        """Largest resident memory of a process of this name."""
        return max((self.most_bytes.get(pid, 0) for pid, other in self.names.items() if other == name), default=0)

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            with contextlib.suppress(psutil.Error):
                self._sample()

    def _sample(self) -> None:
        cpu_s: dict[int, float] = {}
        for pid, seconds in _descendants(self.pid):
            cpu_s[pid] = seconds
            # a title changes once a process knows what it is for; to ask each time would cost what is measured
            if pid not in self.names or len(self.samples) % NAMED_EVERY == 0:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    self.names[pid] = "the command" if pid == self.pid else _name(process)
                    self.most_bytes[pid] = max(process.memory_info().rss, self.most_bytes.get(pid, 0))
        cpu_s = {pid: seconds for pid, seconds in cpu_s.items() if pid in self.names}
        machine = psutil.cpu_times()
        self.samples.append(Sample(time.time(), cpu_s, sum(machine) - machine.idle - machine.iowait))


def _descendants(root: int) -> Iterator[tuple[int, float]]:
    """(process id, CPU seconds) of a process and all below it. psutil would take ten times as long, on the cores that
    are measured."""
    found: dict[int, tuple[int, float]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b") ")[2].split()
                found[int(name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in found.items():
        children[parent].append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        if pid in found:
            yield pid, found[pid][1]


def _name(process: psutil.Process) -> str:
    """What a process is: the title that Ray gave it, or the program that it runs."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split("(")[0]
    programs = [word for word in words[:6] if not word.startswith("-")]
    for word in programs:
        stem = word.rpartition("/")[2]
        if not stem.startswith("python") and stem:
            parent = word.rpartition("/")[0].rpartition("/")[2]
            return f"{parent}/{stem}" if stem in ("agent.py", "main.py") else stem
    return process.name()
