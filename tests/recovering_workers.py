"""Workers and spares of one training as gloo processes, with faults at chosen points, and what they compute."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from small_runs import Classify, RankContext, make_job
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.launch.workers.forks import begin_imports, without_main
from scaleray.records.run_record import EvaluationRecord, EventRecord, StepRecord
from scaleray.training import loop
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import Group, Member
from scaleray.training.recovery.recovering import train_in_groups
from scaleray.training.setup.stores import StorePlace
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.live_state import LiveState

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
STEPS, SECRET = 10, "secret"
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
        self._worker.reach(EVALUATION)
        return super().metrics(model, batch)


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


class Worker:
    """One process: worker or spare."""

    def __init__(self, number: int, num_ranks: int, faults: Sequence[Fault], folder: str) -> None:
        self.number, self.num_ranks, self.folder = number, num_ranks, folder
        self.faults = [fault for fault in faults if fault.number == number]
        self.step = 0
        self.messages: list[Any] = []
        self.weights = ""

    def reach(self, point: str, *, ahead: int = 0) -> None:
        """Suffer the fault that is planted here, if any."""
        for fault in self.faults:
            if (fault.step, fault.point) == (self.step + ahead, point):
                os.kill(os.getpid(), fault.signal)

    def train(self, group: Group, live: LiveState) -> int:
        """Train as a member of a group; returns the rank."""
        live.__class__, live.worker = ObservedState, self  # type: ignore[attr-defined]
        if live.kept is not None:
            self.step = live.kept.manifest.step
        self.reach(JOINED)
        job, sources = make_job(Everything(self), FLAGS, world_size=self.num_ranks)
        place = RankContext(group.rank, group.world_size, group.local_rank, group.local_world_size)
        saves = Checkpointing(job, place, Catalog.of_run(self.folder), emit=self._emit, live=live)
        loop.run(job, place, sources=sources, emit=self._emit, checkpointing=saves, save_weights=self._take_weights)
        return group.rank

    def _emit(self, *messages: Any) -> None:
        self.messages += messages

    def _take_weights(self, share: Any, name: str) -> None:
        digest = hashlib.sha256()
        for key, value in sorted(share.tensors.items()):
            digest.update(key.encode() + value.detach().numpy().tobytes())
        self.weights = digest.hexdigest()


def _run(number: int, place: StorePlace, num_ranks: int, faults: Sequence[Fault], folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worker = Worker(number, num_ranks, faults, folder)
    member = Member(place, SECRET, number=number, node="127.0.0.1", silent_s=3.0)
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


def train_with(faults: Sequence[Fault], folder: str, *, num_ranks: int = 3, num_spares: int = 1) -> Outcome:
    """Train in processes of their own, some of which suffer faults."""
    lost: list[str] = []
    begin_imports()
    coordinator = Coordinator("127.0.0.1", num_ranks, token=SECRET, silent_s=3.0, first_group_s=600.0, say=lost.append)
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    try:
        for number in range(num_ranks + num_spares):
            ours, theirs = context.Pipe()
            arguments = (number, coordinator.place, num_ranks, tuple(faults), folder, theirs)
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
    return Outcome(next(w for rank, w, _ in found if rank == 0), losses, metrics, lost, resumed)
