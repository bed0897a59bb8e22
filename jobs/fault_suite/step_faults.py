"""Faults within steps: which there are, how each is drawn from a seed, and what became of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from fault_suite import members
from fault_suite.links import Links, can_cut
from fault_suite.members import Size
from fault_suite.spared import COORDINATOR, Broken, SparedTraining, differences

A_TRAINING, LAST_STEPS = 9, 30
"""Faults of a training, and steps at its end in which none strikes."""
LINK_TIMEOUT_S = 4.0
POINTS = {
    "killed in the forward pass": (members.FORWARD, 0.005),
    "killed between two buckets": (members.BUCKETS, 0.002),
    "killed between sums and update": (members.SUMS, 0.0005),
    "killed in the update": (members.UPDATE, 0.003),
    "killed after the update": (members.KEPT, 0.002),
    "killed in an evaluation": (members.EVALUATION, 0.002),
    "killed in a checkpoint": (members.CHECKPOINT, 0.03),
}
"""Points of a worker, and seconds within which it is killed after it."""
SIGNALS = ("killed", "two killed", "killed in a recovery", "stopped")
CUTS = ("link cut", "link to the coordinator cut", "link of two workers cut", "link slowed")
LAST = ("coordinator killed", "coordinator and a worker killed")
KINDS = (*SIGNALS, *POINTS, "coordinator stopped", *LAST, *CUTS)


@dataclass(frozen=True)
class StepFault:
    """A fault. after: steps after the previous one. at_step, still_s: where it struck and how long training stood
    still; None: it has not struck. problem: what was wrong afterwards."""

    number: int
    kind: str
    after: int
    rank: int
    other: int
    delay_s: float
    seconds: float
    at_step: int | None = None
    still_s: float | None = None
    problem: str = ""


def drawn(number: int, seed: int, kinds: Sequence[str], ranks: int) -> StepFault:
    """The fault of a number, which depends on nothing else."""
    draw = random.Random(f"{seed} {number}")
    kind = kinds[draw.randrange(len(kinds))]
    rank, other = draw.sample(range(ranks), 2)
    _, within_s = POINTS.get(kind, (0, 0.1))
    return StepFault(
        number, kind, draw.randint(3, 25), rank, other, draw.uniform(0.0, within_s), draw.uniform(0.5, 4.0)
    )


@dataclass
class Report:
    """All faults."""

    seed: int
    faults: list[StepFault] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """Stacks of workers that gloo kept in a broken group, and that ended therefore."""
    wall_s: float = 0.0
    busy_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong afterwards."""
        return not any(fault.problem for fault in self.faults)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"seed": self.seed, "wall_s": self.wall_s, "cpu_s_of_the_machine": self.busy_s}
        return {
            **facts,
            "load": os.getloadavg(),
            "stuck": len(self.stuck),
            "faults": [asdict(fault) for fault in self.faults],
        }

    def rows(self) -> list[list[str]]:
        """For each kind: its faults, those without consequence, and how long training stood still."""
        kinds = {fault.kind: [f for f in self.faults if f.kind == fault.kind] for fault in self.faults}
        return [_row(kind, kinds[kind]) for kind in KINDS if kind in kinds] + [_row("all", self.faults)]


def _row(kind: str, faults: Sequence[StepFault]) -> list[str]:
    still = sorted(fault.still_s for fault in faults if fault.still_s is not None)
    good = sum(not fault.problem for fault in faults)
    if not still:
        return [kind, str(len(faults)), str(good), "-", "-", "-"]
    p95 = still[min(len(still) - 1, int(0.95 * len(still)))]
    return [kind, str(len(faults)), str(good), *(f"{s:.2f}" for s in (statistics.median(still), p95, still[-1]))]


def strike(fault: StepFault, training: SparedTraining) -> tuple[float, float] | None:
    """Let a fault happen; returns when it did, and when it was over. None: the training ended before."""
    links = training.links
    training.struck.clear()
    if fault.kind in POINTS:
        training.traps.set(0, fault.rank, POINTS[fault.kind][0], fault.delay_s)
        training.wait_for(lambda: training.is_over or 0 in training.struck, fault.kind)
        training.traps.clear()
        return (training.struck[0], training.struck[0]) if training.struck else None
    training.pause(fault.delay_s)
    place = training.members
    if training.is_over or len(place) < training.size.ranks:
        return None
    victim, other = place[fault.rank], place[fault.other]
    if fault.kind == "killed":
        at = training.signal(victim, signal.SIGKILL)
    elif fault.kind == "two killed":
        at = training.signal(victim, signal.SIGKILL)
        training.pause(fault.delay_s / 2)
        if other in training.running:
            training.signal(other, signal.SIGKILL)
    elif fault.kind == "killed in a recovery":
        training.traps.set(0, fault.other, members.JOINED, fault.delay_s)
        at = training.signal(victim, signal.SIGKILL)
        training.wait_for(lambda: training.is_over or 0 in training.struck, fault.kind)
        training.traps.clear()
    elif fault.kind == "stopped":
        at = training.signal(victim, signal.SIGSTOP)
    elif fault.kind == "coordinator stopped":
        at = training.signal(COORDINATOR, signal.SIGSTOP)
        training.pause(1.5 * fault.seconds)
        training.signal(COORDINATOR, signal.SIGCONT)
    elif fault.kind in LAST:
        at = training.signal(COORDINATOR, signal.SIGKILL)
        training.wait_for(lambda: not training.has_coordinator, fault.kind)
        if fault.kind != "coordinator killed" and victim in training.running:
            training.signal(victim, signal.SIGKILL)
    else:
        assert links is not None
        at = time.time()
        if fault.kind == "link cut":
            links.cut(victim)  # for ever: another worker takes its place
        elif fault.kind == "link slowed":
            links.slow(victim, 5 * fault.seconds)
            training.pause(fault.seconds)
            links.heal(victim)
        else:
            pair = (victim, other if fault.kind == "link of two workers cut" else COORDINATOR)
            links.cut_between(*pair)
            training.pause(training.size.silent_s + fault.seconds)
            for number in pair:
                if number in training.running:
                    links.heal(number)
    return at, time.time()


def suffer(
    faults: Sequence[StepFault], size: Size, links: Links | None, calm: SparedTraining
) -> tuple[list[StepFault], list[str]]:
    """One training with some faults, one after another, what became of each, and stacks of workers that could not leave
    a group. The folder stays if there are any, or if anything is wrong."""
    done: list[StepFault] = []
    struck: list[tuple[float, float]] = []
    folder = Path(tempfile.mkdtemp(prefix="scaleray-step-faults-"))
    training = SparedTraining(size, folder, links)
    try:
        for fault in faults:
            due = training.newest + fault.after
            training.wait_for(lambda due=due: training.is_over or _is_ready(training, due), "whole group")
            if training.is_over or training.newest > size.steps - LAST_STEPS:
                break
            step = training.newest
            if times := strike(fault, training):
                done.append(replace(fault, at_step=step))
                struck.append(times)
        training.wait_for(lambda: training.is_over, "step")
        problem = "; ".join(differences(calm, training))
    except Broken as exc:
        problem = str(exc)
    finally:
        training.close()
    stuck = [str(file) for file in folder.glob("stuck-*.txt")]
    if problem:
        problem += f" (see {folder})"
    elif not stuck:
        shutil.rmtree(folder, ignore_errors=True)
    ends = [at for at, _ in struck[1:]] + [float("inf")]
    result = []
    for fault, (at, over), until in zip(done, struck, ends, strict=True):
        still = None if fault.kind in LAST else training.still_s(at, min(until, over + 20.0))
        result.append(replace(fault, still_s=still, problem=problem))
    return result, stuck


def run_step_faults(
    num_faults: int, *, seed: int, kinds: Sequence[str], only: Sequence[int], minutes: float, say: Callable[[str], None]
) -> Report:
    """Trainings with so many faults, or with those of the numbers `only`, each alone. minutes: no training begins
    after so many."""
    report = Report(seed)
    started, busy_s = time.time(), _busy_s()
    if not can_cut() and (cuts := [kind for kind in kinds if kind in CUTS]):
        say(f"left out, since links are cut by root with the programs of iproute2 only: {', '.join(cuts)}")
        kinds = [kind for kind in kinds if kind not in CUTS]
    links = Links() if any(kind in CUTS for kind in kinds) else None
    size = Size(links=links is not None, timeout_s=LINK_TIMEOUT_S if links else 60.0)
    folder = Path(tempfile.mkdtemp(prefix="scaleray-step-faults-"))
    calm = SparedTraining(size, folder, links)
    try:
        calm.wait_for(lambda: calm.is_over, "step")
    finally:
        calm.close()
        shutil.rmtree(folder, ignore_errors=True)
    say(f"undisturbed: {size.steps} steps of {1000 * calm.step_s:.0f} ms, load {os.getloadavg()[0]:.1f}")
    waiting = [drawn(number, seed, kinds, size.ranks) for number in only or range(num_faults)]
    while waiting and time.time() - started < 60 * minutes:
        faults = _dealt(waiting, 1 if only else A_TRAINING)
        found, stuck = suffer(faults, size, links, calm)
        report.faults += found
        report.stuck += stuck
        done = {fault.number for fault in found}
        waiting = [fault for fault in waiting if fault.number not in done]
        for file in stuck:
            say(f"a worker could not leave its group: {file}")
        for fault in found:
            still = "" if fault.still_s is None else f", stood still for {fault.still_s:.2f} s"
            say(
                f"fault {fault.number}, {fault.kind} at step {fault.at_step}{still}{fault.problem and ': ' + fault.problem}"
            )
        say(f"{len(report.faults)} faults, load {os.getloadavg()[0]:.1f}")
    report.wall_s, report.busy_s = time.time() - started, _busy_s() - busy_s
    return report


def _is_ready(training: SparedTraining, due: int) -> bool:
    return training.newest >= due and training.is_whole


def _dealt(waiting: Sequence[StepFault], num: int) -> list[StepFault]:
    """The faults of the next training, with at most one of those that no other can follow."""
    last = [fault for fault in waiting if fault.kind in LAST]
    others = [fault for fault in waiting if fault.kind not in LAST]
    return [*others[: num - 1], *last[:1]] if last and others else (others or last[:1])[:num]


def _busy_s() -> float:
    """CPU seconds of the machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)
