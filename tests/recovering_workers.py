"""Workers and spares of one training as gloo processes, with faults at chosen points, and what they compute."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import Classify, RankContext, make_job
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.holder import Holder
from scaleray.launch.workers.forks import begin_imports, without_main
from scaleray.records.run_record import EvaluationRecord, EventRecord, StepRecord
from scaleray.training import loop
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import Group, Member
from scaleray.training.recovery.recovering import train_in_groups
from scaleray.training.setup.stores import StorePlace
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.live_state import LiveState
from scaleray.training.state.memory_copies import HolderPlace, Holders

FORWARD, DECISION, UPDATED, KEPT, EVALUATION, JOINED = [
    "forward",
    "decision",
    "updated",
    "kept",
    "evaluation",
    "joined",
]
"""Points of a step: in the forward pass, between the sums and the update, after the update, before the next step, in
the evaluation after it; and when a group begins with that many steps."""
STEPS, SECRET, ANY = 10, "secret", -1
FLAGS = {
    "deterministic": True,
    "checkpoint.every": "4 steps",
    "evaluation.every": "3 steps",
    "stop.after": f"{STEPS} steps",
    "schedule.name": "cosine",
    "schedule.warmup": "4 steps",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.clip_norm": 0.5,
    "precision.dtype": "fp32",
    "batch.global_size": 9,
    "strategy.name": "ddp",
}


@dataclass(frozen=True)
class Setting:
    """What all workers of a training are given. places: holders in memory, for worker after worker in turn."""

    folder: str
    num_ranks: int = 3
    flags: Mapping[str, Any] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    places: Sequence[HolderPlace] = ()
    workload: type[Everything] | None = None
    is_late: bool = False
    """The last process comes when the group has shrunk; the others wait for it in a later step."""


@dataclass(frozen=True)
class Fault:
    """A signal to a worker, given by its number, at a point of a step."""

    number: int
    step: int
    point: str
    signal: signal.Signals = signal.SIGKILL


class Everything(Classify):
    """Dropout, BatchNorm, and a loss that draws from the generators of NumPy and Python."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(num_rows=26, num_val=10)
        self._worker = worker

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, model, batch):
        if model.training:
            self._worker.reach(FORWARD, ahead=1)
        noise = 0.01 * float(np.random.normal()) + 0.01 * random.gauss(0, 1)
        total = F.cross_entropy(model(batch["x"]) * (1 + noise), batch["y"], reduction="sum")
        return total, len(batch["y"])

    def metrics(self, model, batch):
        self._worker.reach(EVALUATION, ahead=int(self._worker.has_copies))
        return super().metrics(model, batch)


class Plain(Everything):
    """A model whose results do not depend on the division of a batch."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, model, batch):
        if model.training:
            self._worker.meet_late()
            self._worker.reach(FORWARD, ahead=1)
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class ObservedState(LiveState):
    """The state in memory, with points for faults."""

    worker: Worker

    def before_update(self, module: nn.Module) -> None:
        self.worker.reach(DECISION, ahead=1)
        super().before_update(module)

    def keep(self, state: Any, job: Any, step: int, signals: Any, *, is_complete: bool) -> None:
        self.worker.step = step
        if not is_complete:
            self.worker.reach(UPDATED)
        super().keep(state, job, step, signals, is_complete=is_complete)
        self.worker.reach(KEPT)


class ObservedCopies(Checkpointing):
    """Copies in the memory of others, with points for faults."""

    worker: Worker

    def find(self) -> int:
        step = super().find()
        if self.live is None:
            self.worker.step = step
            self.worker.reach(JOINED)
        return step

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        if self.live is None:
            self.worker.step = step
            self.worker.reach(UPDATED)
        is_over = super().after_step(step, signals)
        if self.live is None:
            self.worker.reach(KEPT)
        return is_over


class Worker:
    """One process: worker or spare."""

    def __init__(self, number: int, setting: Setting) -> None:
        self.number, self.setting = number, setting
        self.faults = [fault for fault in setting.faults if fault.number == number]
        self.step = 0
        self.messages: list[Any] = []
        self.weights = ""

    def reach(self, point: str, *, ahead: int = 0) -> None:
        """Suffer the fault that is planted here, if any."""
        for fault in self.faults:
            if fault.point == point and fault.step in (ANY, self.step + ahead):
                os.kill(os.getpid(), fault.signal)

    def train(self, group: Group, live: LiveState) -> int:
        """Train as a member of a group; returns the rank."""
        live.__class__, live.worker = ObservedState, self  # type: ignore[attr-defined]
        if live.kept is not None:
            self.step = live.kept.manifest.step
        if not self.has_copies:
            self.reach(JOINED)
        flags = {**FLAGS, **self.setting.flags}
        job, sources = make_job((self.setting.workload or Everything)(self), flags, world_size=self.setting.num_ranks)
        job = job.on(group.world_size)
        place = RankContext(group.rank, group.world_size, group.local_rank, group.local_world_size)
        catalog = Catalog.of_run(self.setting.folder)
        saves = ObservedCopies(job, place, catalog, emit=self._emit, live=live, holders=self._holders())
        saves.worker = self
        loop.run(job, place, sources=sources, emit=self._emit, checkpointing=saves, save_weights=self._take_weights)
        return group.rank

    def meet_late(self) -> None:
        """In a group that has shrunk, ask for the late process, and wait for it in the last step but two."""
        if self.setting.is_late and dist.get_world_size() < self.setting.num_ranks:
            Path(self.setting.folder, "asked").touch()
            while self.step + 1 == STEPS - 2 and not Path(self.setting.folder, "come").exists():
                time.sleep(0.05)

    def _holders(self) -> Holders | None:
        if not (places := self.setting.places):
            return None
        return Holders(places[self.number % len(places)], lambda: list(places), self.steps)

    @property
    def has_copies(self) -> bool:
        """Whether the state has copies in memory; then a step counts once they are made."""
        return bool(self.setting.places)

    def steps(self) -> list[Any]:
        """Messages of steps and evaluations so far."""
        return [each for each in self.messages if isinstance(each, StepRecord | EvaluationRecord)]

    def _emit(self, *messages: Any) -> None:
        self.messages += messages

    def _take_weights(self, share: Any, name: str) -> None:
        digest = hashlib.sha256()
        for key, value in sorted(share.tensors.items()):
            digest.update(key.encode() + value.detach().numpy().tobytes())
        self.weights = digest.hexdigest()


def _run(number: int, place: StorePlace, setting: Setting, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worker = Worker(number, setting)
    is_late = setting.is_late and number >= setting.num_ranks
    while is_late and not Path(setting.folder, "asked").exists():
        time.sleep(0.05)
    member = Member(place, SECRET, number=number, node="127.0.0.1", silent_s=3.0)
    if is_late:
        threading.Timer(1.0, Path(setting.folder, "come").touch).start()
    rank = train_in_groups(member, lambda group: group.join("gloo", 60.0, "cpu"), worker.train)
    pipe.send((rank, worker.weights, worker.messages))


@dataclass(frozen=True)
class Outcome:
    """Results of a training, and the reports of its losses. losses, metrics: of each step that was recorded, by rank 0
    of any group; a step that was recorded twice has both values."""

    weights: str
    losses: dict[int, set[float]]
    metrics: dict[int, set[tuple[Any, ...]]]
    lost: list[str]
    resumed: list[str]
    warnings: list[str]


def train_with(
    faults: Sequence[Fault],
    folder: str,
    *,
    num_ranks: int = 3,
    num_spares: int = 1,
    flags: Mapping[str, Any] | None = None,
    num_holders: int = 0,
    **more: Any,
) -> Outcome:
    """Train in processes of their own, some of which suffer faults. num_holders: processes for copies in memory, which
    are this one."""
    lost: list[str] = []
    holders = [Holder("127.0.0.1", SECRET) for _ in range(num_holders)]
    places = [HolderPlace(f"node{i}", f"node{i}", "127.0.0.1", holder.port, SECRET) for i, holder in enumerate(holders)]
    setting = Setting(folder, num_ranks, flags or {}, tuple(faults), places, **more)
    Path(folder).mkdir(exist_ok=True)
    begin_imports()
    shrinks = (flags or {}).get("recovery.on_loss") == "shrink"
    coordinator = Coordinator(
        "127.0.0.1", num_ranks, token=SECRET, silent_s=3.0, shrinks=shrinks, first_group_s=600.0, say=lost.append
    )
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    try:
        for number in range(num_ranks + num_spares):
            ours, theirs = context.Pipe()
            arguments = (number, coordinator.place, setting, theirs)
            processes.append(context.Process(target=_run, args=arguments, daemon=True))
            pipes.append(ours)
            with without_main():
                processes[-1].start()
            theirs.close()
        found = []
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError:  # it was killed
                found.append((None, "", []))
    finally:
        for process in processes:
            process.kill()
            process.join()
        coordinator.close()
        for holder in holders:
            holder.close()
    messages = [message for _, _, theirs in found for message in theirs]
    losses: dict[int, set[float]] = {}
    metrics: dict[int, set[tuple[Any, ...]]] = {}
    for message in messages:
        for each in getattr(message, "messages", [message]):
            if isinstance(each, StepRecord):
                losses.setdefault(each.step, set()).add(each.loss)
            elif isinstance(each, EvaluationRecord):
                metrics.setdefault(each.step, set()).add(tuple(sorted(each.metrics.items())))
    resumed = [m.text for m in messages if isinstance(m, EventRecord) and m.kind == "resumed"]
    warnings = [m.text for m in messages if isinstance(m, EventRecord) and m.kind == "warning"]
    return Outcome(next(w for rank, w, _ in found if rank == 0), losses, metrics, lost, resumed, warnings)
