"""A training with spares whose processes suffer faults; each process that is lost is replaced, as Ray does."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fault_suite.links import Links
from fault_suite.members import LOOPBACK, TOKEN, Size, Traps, run_coordinator, run_worker
from scaleray.checkpoints.holder import Holder
from scaleray.training.recovery.member import EXIT_CODE
from scaleray.training.state.memory_copies import HolderPlace

COORDINATOR = 0
STILL_S = 90.0
"""Seconds without a step after which a training counts as hanging."""


class Broken(Exception):
    """The training did something that no fault explains."""


class SparedTraining:
    """Processes of one training, and everything that they report. links: network with a link for each process."""

    def __init__(self, size: Size, folder: Path, links: Links | None = None) -> None:
        held = [Holder(LOOPBACK, TOKEN) for _ in range(2 if size.strategy != "ddp" else 0)]
        places = [HolderPlace(f"node{i}", f"node{i}", LOOPBACK, holder.port, TOKEN) for i, holder in enumerate(held)]
        self.size, self.folder, self.links = dataclasses.replace(size, holders=tuple(places)), folder, links
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fault_suite.members", "scaleray.verification.variants"])
        self.traps = Traps(self.context)
        self.running: dict[int, tuple[Any, Any]] = {}
        self.roles: dict[int, tuple[int, int]] = {}
        """Epoch and rank of each worker."""
        self.ready: set[int] = set()
        self.has_coordinator = self.is_restarted = False
        self.newest, self.moved_at = 0, time.time()
        self.struck: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.losses: dict[int, set[float]] = defaultdict(set)
        self.evaluations: dict[int, set[Any]] = defaultdict(set)
        self.weights: dict[int, str] = {}
        self.lost: list[str] = []
        self.restarts = self.stuck = 0
        self._numbers = itertools.count(1)
        self.begin()

    def begin(self) -> None:
        """Start the coordinator, the workers and the spares."""
        if self.links:
            self.links.begin()
        host = self.links.address(COORDINATOR) if self.links else LOOPBACK
        self._start(COORDINATOR, run_coordinator, host, self.size, str(self.folder))
        self.has_coordinator, self.place = True, None
        self.wait_for(lambda: self.place is not None, "the coordinator")
        for number in range(self.size.ranks + self.size.spares):
            self.add_worker(number)

    def add_worker(self, order: int | None = None) -> None:
        """Start a worker. order: its number in the coordinator's order, if it is one of the first."""
        number = next(self._numbers)
        host = self.links.address(number) if self.links else LOOPBACK
        known_as = number + 1000 if order is None else order
        self._start(number, run_worker, known_as, host, self.place, self.size, str(self.folder), self.traps)

    @property
    def members(self) -> dict[int, int]:
        """Number of the process of each rank in the newest group."""
        epoch = max((epoch for number, (epoch, _) in self.roles.items() if number in self.running), default=0)
        return {rank: n for n, (e, rank) in self.roles.items() if e == epoch and n in self.running}

    @property
    def is_whole(self) -> bool:
        """Whether all ranks train in one group, and a spare waits."""
        waiting = [n for n in self.ready if n in self.running and n not in self.roles]
        return len(self.members) == self.size.ranks and len(waiting) >= self.size.spares

    @property
    def is_over(self) -> bool:
        """Whether all workers have ended."""
        return set(self.running) <= {COORDINATOR}

    def pid(self, number: int) -> int:
        """Process id."""
        return int(self.running[number][0].pid)

    def signal(self, number: int, kind: signal.Signals) -> float:
        """Send a signal to a process; returns the time."""
        os.kill(self.pid(number), kind)
        return time.time()

    def wait_for(self, condition: Callable[[], Any], what: str, *, seconds: float = STILL_S) -> None:
        """Read messages until a condition holds. Raises Broken if it does not in time, after the last step."""
        self.moved_at = max(self.moved_at, time.time())
        while not condition():
            self.read()
            if time.time() - self.moved_at > seconds:
                raise Broken(f"no {what} for {seconds:.0f} s")

    def pause(self, seconds: float) -> None:
        """Read messages for some seconds."""
        until = time.time() + seconds
        while (left := until - time.time()) > 0:
            self.read(min(left, 0.1))

    def read(self, timeout: float = 0.1) -> None:
        """Read the messages that have come."""
        pipes = {pipe: number for number, (_, pipe) in self.running.items()}
        for pipe in wait(list(pipes), timeout=timeout):
            number = pipes[pipe]
            if number in self.running and self.running[number][1] is pipe:
                self._receive(number, pipe)

    @property
    def training_s(self) -> float:
        """Seconds from the end of the first step to that of the last one."""
        return max(self.ended.values()) - min(self.ended.values())

    @property
    def step_s(self) -> float:
        """Seconds of a usual step."""
        return statistics.median(b - a for a, b in self._gaps())

    def still_s(self, at: float, until: float) -> float:
        """The longest time between two steps after a fault and before the next one, less that of a usual step."""
        gaps = [b - a for a, b in self._gaps() if b > at and (a <= at or b <= until)]
        return max(gaps, default=self.step_s) - self.step_s

    def lost_s(self, at: float, until: float) -> float:
        """Seconds by which steps between a fault and a later time took longer than three usual ones."""
        gaps = [b - a for a, b in self._gaps() if b > at and (a <= at or b <= until)]
        return sum(gap - self.step_s for gap in gaps if gap > 3 * self.step_s)

    def _gaps(self) -> list[tuple[float, float]]:
        return list(itertools.pairwise(at for _, at in sorted(self.ended.items())))

    def close(self) -> None:
        """End all processes."""
        for number in list(self.running):
            self._end(number)

    def _start(self, number: int, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self.running[number] = process, ours

    def _end(self, number: int) -> int:
        process, pipe = self.running.pop(number)
        process.kill()
        process.join()
        pipe.close()
        return int(process.exitcode)

    def _receive(self, number: int, pipe: Any) -> None:
        try:
            kind, *values = pipe.recv()
        except (EOFError, OSError):
            self._gone(number)
            return
        if kind == "step":
            step, at = values
            self.ended[step] = min(at, self.ended.get(step, at))
            if step > self.newest:
                self.newest, self.moved_at = step, time.time()
        elif kind == "loss":
            self.losses[values[0]].add(values[1])
        elif kind == "evaluation":
            self.evaluations[values[0]].add(values[1])
        elif kind == "group":
            self.roles[number] = values[0], values[1]
        elif kind == "struck":
            self.struck[values[0]] = values[1]
        elif kind == "ready":
            self.ready.add(number)
        elif kind == "lost":
            self.lost.append(values[0])
        elif kind == "place":
            self.place = values[0]
        elif kind == "unlinked":
            assert self.links is not None
            self.links.join(number, self.pid(number))
            pipe.send("joined")
        elif kind == "end":
            if values[0] is not None:
                self.weights[values[0]] = values[1]
            self.running[number][0].join()
            self.running.pop(number)[1].close()
        else:
            self._receive_other(number, kind, values)

    def _receive_other(self, number: int, kind: str, values: Any) -> None:
        raise Broken(f"unknown message {kind}")

    def _gone(self, number: int) -> None:
        """Replace a process that has ended."""
        self.running[number][0].join(timeout=10)
        code = self.running[number][0].exitcode
        self._end(number)
        if number == COORDINATOR:
            self.has_coordinator = False
        elif code == EXIT_CODE:
            self.stuck += 1
        elif code is None or code >= 0:
            if self.has_coordinator:
                raise Broken(f"worker {number} ended by itself, with code {code}")
            if self.is_over and not self.weights:  # nothing can recover without the coordinator: Ray restarts all
                self.restarts += 1
                self.roles.clear()
                self.begin()
            return
        if number != COORDINATOR and self.has_coordinator and not self.weights:
            self.add_worker()


def differences(undisturbed: SparedTraining, disturbed: SparedTraining) -> Sequence[str]:
    """What a training with faults has computed or recorded differently."""
    found = []
    if not disturbed.weights.get(0) or disturbed.weights.get(0) != undisturbed.weights.get(0):
        found.append("the weights differ")
    if lost := sorted(set(undisturbed.losses) - set(disturbed.losses)):
        found.append(f"steps {lost} are not recorded")
    if twice := [step for step, values in disturbed.losses.items() if len(values) > 1]:
        found.append(f"steps {twice} have two losses")
    if disturbed.losses != undisturbed.losses and not lost and not twice:
        found.append("losses differ")
    if disturbed.evaluations != undisturbed.evaluations:
        found.append(f"evaluations differ: {set(undisturbed.evaluations) ^ set(disturbed.evaluations)}")
    return found
