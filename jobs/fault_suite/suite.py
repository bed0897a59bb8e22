"""Deals faults out to runs, lets them happen, and judges each by the run that it happened to."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fault_suite import services
from fault_suite.checks import Outcome, outcome, same_records, same_weights, used_samples
from fault_suite.cluster import Nodes, local_nodes
from fault_suite.injectors import KINDS, LOCAL, OWN_RAY, PROXY, S3, SERVER, NotInjected, Scene
from fault_suite.run import FULL, Failed, Run, Size

FAULTS_PER_RUN = 7
STEPS_TAKEN = {
    "node drained": 140,
    "S3 answers 500": 120,
    "writes refused": 40,
    "MLflow server killed": 100,
} | dict.fromkeys(PROXY, 60)
"""Steps that pass while some kinds do their harm; they must fit into the run."""
AFTER_LAST = 50  # steps after the last fault of a run


@dataclass
class Fault:
    """One fault and what became of it. step: at which it was due; at_step: at which it struck."""

    kind: str
    run: int
    at_step: int = 0
    is_injected: bool = False
    has_recovered: bool = False
    steps_repeated: int | None = None
    recovery_s: float | None = None
    weights_equal: bool | None = None
    records_equal: bool | None = None
    samples_once: bool | None = None
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Injected, and nothing came of it."""
        return bool(
            self.is_injected and self.has_recovered and self.weights_equal and self.records_equal and self.samples_once
        )


@dataclass
class Report:
    """All faults, and what was wrong beside them."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether everything held."""
        return not self.problems and all(fault.is_good for fault in self.faults if fault.is_injected)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"faults": [asdict(f) for f in self.faults], "problems": self.problems, "wall_s": self.wall_s}


def run_suite(
    num_faults: int, *, seed: int, kinds: Sequence[str], folder: Path, say: Callable[[str], None], size: Size = FULL
) -> Report:
    """The undisturbed run, then disturbed ones until so many faults have struck."""
    started = time.monotonic()
    chosen = random.Random(seed)
    report = Report()
    with contextlib.ExitStack() as stack:
        # workers get the environment of their nodes, so the bucket comes first
        bucket = stack.enter_context(services.bucket()) if any(kind in S3 for kind in kinds) else None
        nodes = stack.enter_context(local_nodes())
        undisturbed = _undisturbed(nodes, folder / "undisturbed", size, say)
        missing, number = num_faults, 0
        dealt: list[str] = []
        while missing > 0 and number < num_faults + 3:  # a kind that cannot be injected must not go on for ever
            for names in _deal(missing, kinds, dealt, chosen):
                number += 1
                disturbed = _Disturbed(
                    nodes, bucket, undisturbed, folder / f"run-{number:02d}", number, chosen, report, size, say
                )
                disturbed.suffer(names)
            missing = num_faults - sum(fault.is_injected for fault in report.faults)
    report.wall_s = time.monotonic() - started
    return report


def _deal(num_faults: int, kinds: Sequence[str], dealt: list[str], chosen: random.Random) -> list[list[str]]:
    """Kinds for the next runs: each kind about as often as any other, several a run, in random order."""
    names: list[str] = []
    while len(names) < num_faults:
        fewest = min(dealt.count(kind) for kind in kinds)
        names.append(chosen.choice([kind for kind in kinds if dealt.count(kind) == fewest]))
        dealt.append(names[-1])
    runs: list[list[str]] = []
    for place in (LOCAL, S3, SERVER, PROXY, OWN_RAY):
        own = [name for name in names if name in place]
        chosen.shuffle(own)
        # as many runs as needed, and no two kinds that take long in one where that can be helped
        number = max(-(-len(own) // FAULTS_PER_RUN), -(-sum(STEPS_TAKEN.get(n, 0) for n in own) // 200))
        own.sort(key=lambda name: -STEPS_TAKEN.get(name, 0))
        parts = [own[first::number] for first in range(number)]
        for part in parts:
            chosen.shuffle(part)
        runs += parts
    return runs


def _undisturbed(nodes: Nodes, folder: Path, size: Size, say: Callable[[str], None]) -> Outcome:
    run = Run(folder, _environment(nodes), size)
    started = time.monotonic()
    run.start()
    try:
        found = outcome(run, run.finish())
    finally:
        run.stop()
    wrong = used_samples(run.entries(), steps=size.steps)
    if found.status != "FINISHED" or wrong or run.starts != 1:
        raise Failed(f"the undisturbed run is not as it should be: {found.status}, {wrong}")
    say(f"undisturbed: {size.steps} steps in {time.monotonic() - started:.0f} s")
    return found


def _environment(nodes: Nodes) -> dict[str, str]:
    # a drain is noticed within a second, as the suite has no minutes to give
    return {**nodes.environment(), "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}


CLOCK = """
import os, time
_real = time.time
time.time = lambda: _real() + 3600.0 * os.path.exists(FLAG)
"""


def _own_ray(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a command that starts its own Ray, with a clock that steps when there is a file."""
    clock = folder / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(CLOCK.replace("FLAG", repr(str(clock / "stepped"))))
    own = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, [str(clock), own.get("PYTHONPATH")]))}


class _Disturbed:
    """One run with several faults, one after another."""

    def __init__(
        self,
        nodes: Nodes,
        bucket: services.Bucket | None,
        undisturbed: Outcome,
        folder: Path,
        number: int,
        chosen: random.Random,
        report: Report,
        size: Size,
        say: Callable[[str], None],
    ) -> None:
        self.nodes, self.bucket, self.undisturbed, self.folder, self.number = nodes, bucket, undisturbed, folder, number
        self.random, self.report, self.size, self.say = chosen, report, size, say

    def suffer(self, names: Sequence[str]) -> None:
        """Let the faults happen in this order, and judge."""
        faults = [Fault(name, self.number) for name in names]
        self.report.faults += faults
        self.folder.mkdir(parents=True)
        with self._scene(names) as scene:
            run = scene.run
            problems: list[str] = []
            try:
                run.start()
                for number, fault in enumerate(faults):
                    self._strike(fault, scene, names[number + 1 :])
                found = outcome(run, run.finish())
                self._judge(faults, found, run)
            except Exception as exc:  # whatever it is, the other runs are to be seen too
                kind = "" if isinstance(exc, Failed) else f"{type(exc).__name__}: "
                problems.append(f"run {self.number}: {kind}{exc}")
            finally:
                run.stop()
            problems += [f"run {self.number} left {left}" for left in self.nodes.wait_until_empty(run.processes)]
        for problem in problems:
            self.say(problem)
        self.report.problems += problems

    def _strike(self, fault: Fault, scene: Scene, later: Sequence[str]) -> None:
        run = scene.run
        run.wait_for(lambda: run.step() > 0 or run.is_over, "the first step")
        now = run.step()
        room = self.size.steps - AFTER_LAST - now - sum(STEPS_TAKEN.get(name, 0) for name in (fault.kind, *later))
        # a restart repeats as many steps as were not saved, and then some
        due = now + self.random.randint(2, max(3, room // (len(later) + 1) + self.size.checkpoint_every))
        run.wait_for(lambda: run.step() >= due or run.is_over, f"step {due}")
        if run.is_over:
            fault.problem = "the run was over"
            return
        fault.at_step = run.step()
        try:
            at = KINDS[fault.kind](scene)
        except NotInjected as exc:
            fault.problem = str(exc)
            self.say(f"run {self.number}: {fault.kind} at step {fault.at_step} could not be injected: {exc}")
            return
        fault.is_injected = True
        before = [entry for entry in run.entries() if entry.time <= at]
        old, last = {entry.process for entry in before}, max(entry.step for entry in before)

        def beyond() -> float:
            if run.is_over:
                return time.time()  # it struck after the last step
            return next((e.time for e in run.entries() if e.process not in old and e.step > last), 0.0)

        recovered_at = run.wait_for(beyond, f"step {last + 1} after `{fault.kind}`", seconds=150, may_end=True)
        first = min((entry.step for entry in run.entries() if entry.process not in old), default=self.size.steps + 1)
        last_old = max(entry.step for entry in run.entries() if entry.process in old)
        fault.has_recovered = True
        fault.steps_repeated, fault.recovery_s = last_old - first + 1, recovered_at - at
        self.say(
            f"run {self.number}: {fault.kind} at step {fault.at_step}: {fault.steps_repeated} steps repeated, recovered after {fault.recovery_s:.1f} s"
        )

    def _judge(self, faults: Sequence[Fault], found: Outcome, run: Run) -> None:
        weights, samples = same_weights(self.undisturbed, found), used_samples(run.entries(), steps=self.size.steps)
        records = same_records(self.undisturbed, found)
        for fault in faults:
            fault.weights_equal, fault.samples_once, fault.records_equal = not weights, not samples, not records
        for what, wrong in (("weights", weights), ("samples", samples), ("records", records)):
            self.report.problems += [f"run {self.number}, {what}: {text}" for text in wrong[:5]]
            for text in wrong[:5]:
                self.say(f"run {self.number}, {what}: {text}")

    @contextlib.contextmanager
    def _scene(self, names: Sequence[str]) -> Iterator[Scene]:
        environment, options = _environment(self.nodes), {}
        tracking = None
        with contextlib.ExitStack() as stack:
            if any(name in S3 for name in names):
                options["checkpoint.storage_path"] = f"s3://faults/run-{self.number}"
            if any(name in SERVER for name in names):
                tracking = stack.enter_context(services.tracking_server(self.folder))
                options["tracking.uri"] = tracking.uri
            proxy = None
            if any(name in PROXY for name in names):
                proxy = services.Proxy(stack.enter_context(services.tracking_server(self.folder)).uri)
                stack.callback(proxy.server.shutdown)
                options["tracking.uri"] = proxy.uri
            if any(name in OWN_RAY for name in names):
                environment = _own_ray(self.folder, environment)
                options["scale.label_selector"] = {}
            run = Run(self.folder, environment, self.size, options)
            yield Scene(run, self.nodes, self.random, self.bucket, tracking, proxy)


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return statistics.median(values) if values else None
