"""The processes of a training with spares: workers that can suffer a fault at a point of a step, and the coordinator."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

import scaleray
from fault_suite.links import INTERFACE, leave_network
from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.data import TRAIN, Split, load_sources
from scaleray.records.run_record import EvaluationRecord, StepRecord
from scaleray.training import loop
from scaleray.training.process_group import interface_of
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import EXIT_CODE, Group, Member
from scaleray.training.recovery.recovering import train_in_groups
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.live_state import LiveState
from scaleray.training.state.memory_copies import HolderPlace, Holders

TOKEN, LOOPBACK = "faults", "127.0.0.1"
FORWARD, BUCKETS, SUMS, UPDATE, KEPT, EVALUATION, CHECKPOINT, JOINED = range(8)
"""Points at which a worker can suffer a fault: in the forward pass, between two buckets of gradients, between the sums
and the update, in the update, after it, in an evaluation, in a checkpoint, and in a group that follows a loss."""
SLOTS, FREE = 2, -1.0


@dataclass(frozen=True)
class Size:
    """A training. silent_s: see `recovery.silent_s`; timeout_s: see `scale.collective_timeout_s`. links: whether each
    process has a network of its own. strategy: with another one than ddp, `holders` keep copies of the state after each
    step. pause_s: of each step, for computing that takes no core. width: of the network. rows: of a rank in a step."""

    steps: int = 400
    ranks: int = 3
    spares: int = 2
    silent_s: float = 3.0
    timeout_s: float = 60.0
    evaluation_every: int | None = 20
    checkpoint_every: int | None = 25
    links: bool = False
    strategy: str = "ddp"
    pause_s: float = 0.0
    width: int = 512
    rows: int = 32
    holders: tuple[HolderPlace, ...] = ()


class Traps:
    """Faults that wait for a worker, in memory that all processes share. Each is of a rank at a point, some seconds
    after it; a negative delay stops the process instead of killing it."""

    def __init__(self, context: Any) -> None:
        self.values = context.RawArray("d", [FREE, 0.0, 0.0] * SLOTS)

    def set(self, slot: int, rank: int, point: int, delay_s: float) -> None:
        """Set a trap."""
        self.values[3 * slot + 1 : 3 * slot + 3] = [float(point), delay_s]
        self.values[3 * slot] = float(rank)

    def is_set(self, slot: int) -> bool:
        """Whether the fault has not happened."""
        return bool(self.values[3 * slot] != FREE)

    def clear(self) -> None:
        """Take all away."""
        for slot in range(SLOTS):
            self.values[3 * slot] = FREE

    def spring(self, rank: int, point: int) -> tuple[int, float] | None:
        """The slot and the delay of a fault of this rank here, which happens only once."""
        for slot in range(SLOTS):
            if self.values[3 * slot] == rank and self.values[3 * slot + 1] == point:
                self.values[3 * slot] = FREE
                return slot, self.values[3 * slot + 2]
        return None


class Network(scaleray.Workload):
    """Classification of fixed random rows, with dropout and BatchNorm; 0.6 million parameters, in two buckets of DDP."""

    def __init__(
        self, reach: Callable[[int], None] = lambda point: None, width: int = 512, pause_s: float = 0.0
    ) -> None:
        self.reach, self.width, self.pause_s = reach, width, pause_s
        self.step_callbacks: list[Any] = []

    def build_model(self) -> nn.Module:
        width = self.width
        layers: list[nn.Module] = [nn.Linear(64, width)]
        for _ in range(2):
            layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        model[1].weight.register_hook(self._between_buckets)
        return model

    def datasets(self) -> dict[str, Any]:
        draw = np.random.default_rng(0)
        rows = {"x": draw.normal(size=(1000, 64)).astype(np.float32), "y": draw.integers(0, 10, 1000)}
        return {"train": rows, "val": {name: values[:60] for name, values in rows.items()}}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.reach(FORWARD if model.training else EVALUATION)
        time.sleep(self.pause_s)
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def callbacks(self) -> list[Any]:
        return self.step_callbacks

    def _between_buckets(self, gradient: torch.Tensor) -> None:
        self.reach(BUCKETS)


class TrappedState(LiveState):
    """The state in memory, with points for faults."""

    reach: Callable[[int], None]

    def before_update(self, module: nn.Module) -> None:
        self.reach(SUMS)
        super().before_update(module)
        self.reach(UPDATE)

    def keep(self, *arguments: Any, is_complete: bool) -> None:
        super().keep(*arguments, is_complete=is_complete)
        if not is_complete:
            self.reach(KEPT)


class TrappedCheckpointing(Checkpointing):
    """Checkpoints, with a point for faults."""

    reach: Callable[[int], None]

    def save(self, step: int) -> None:
        self.reach(CHECKPOINT)
        super().save(step)


class Steps(scaleray.Callback):
    """Sends the wall clock at the end of each step."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send = send

    def on_step(self, run: Any) -> None:
        self.send("step", run.step, time.time())


class Worker:
    """A worker or a spare. pipe: to the process that plans the faults."""

    def __init__(self, number: int, size: Size, folder: str, traps: Traps, pipe: Any) -> None:
        self.number, self.size, self.folder, self.traps, self.pipe = number, size, folder, traps, pipe
        self.rank, self.weights = -1, ""
        self._lock = threading.Lock()

    def send(self, kind: str, *values: Any) -> None:
        """Send a message to the process that plans the faults."""
        with self._lock:
            self.pipe.send((kind, *values))

    def reach(self, point: int) -> None:
        """Suffer the fault that waits here, if any."""
        if (found := self.traps.spring(self.rank, point)) is None:
            return
        slot, delay_s = found
        self.send("struck", slot, time.time() + max(0.0, delay_s))
        if delay_s < 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif delay_s == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            signal.setitimer(signal.ITIMER_REAL, delay_s)  # the system ends the process, wherever it is then

    def train(self, group: Group, live: LiveState) -> int:
        """Train as a member of a group."""
        self.rank = group.rank
        self.send("group", group.epoch, group.rank)
        live.__class__, live.reach = TrappedState, self.reach  # type: ignore[attr-defined]
        if group.epoch > 1:
            self.reach(JOINED)
        workload = Network(self.reach, self.size.width, self.size.pause_s)
        workload.step_callbacks = [Steps(self.send)]
        job, sources = _job(self.size, workload)
        place = RankContext(group.rank, group.world_size, group.local_rank, group.local_world_size)
        places = self.size.holders
        holders = Holders(places[self.number % len(places)], lambda: list(places)) if places else None
        catalog = Catalog.of_run(self.folder)
        saves = TrappedCheckpointing(job, place, catalog, emit=self._emit, live=live, holders=holders)
        saves.reach = self.reach
        loop.run(job, place, sources=sources, emit=self._emit, checkpointing=saves, save_weights=self._keep_weights)
        return group.rank

    def _emit(self, *messages: Any) -> None:
        for message in messages:
            for each in getattr(message, "messages", [message]):
                if isinstance(each, StepRecord):
                    self.send("loss", each.step, each.loss)
                elif isinstance(each, EvaluationRecord):
                    self.send("evaluation", each.step, tuple(sorted(each.metrics.items())))

    def _keep_weights(self, share: Any, name: str) -> None:
        content = b"".join(value.detach().numpy().tobytes() for _, value in sorted(share.tensors.items()))
        self.weights = hashlib.sha256(content).hexdigest()


def run_worker(number: int, host: str, place: Any, size: Size, folder: str, traps: Traps, pipe: Any) -> None:
    """The process of a worker. host: its address. place: of the coordinator."""
    enter(size, pipe, Path(folder, f"worker-{number}.log"))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if size.links else interface_of(host) or "lo"
    worker = Worker(number, size, folder, traps, pipe)
    os._exit = _exit_with_report(Path(folder, f"stuck-{number}.txt"))  # type: ignore[assignment]
    member = Member(place, TOKEN, number=number, node=host, silent_s=size.silent_s)
    worker.send("ready")
    rank = train_in_groups(member, lambda group: group.join("gloo", size.timeout_s, "cpu"), worker.train)
    worker.send("end", rank, worker.weights)


def run_coordinator(host: str, size: Size, folder: str, pipe: Any) -> None:
    """The process of the coordinator."""
    enter(size, pipe, Path(folder, "coordinator.log"))
    say = lambda text: pipe.send(("lost", text))
    coordinator = Coordinator(host, size.ranks, token=TOKEN, silent_s=size.silent_s, first_group_s=600.0, say=say)
    pipe.send(("place", coordinator.place))
    threading.Event().wait()


def enter(size: Size, pipe: Any, log: Path) -> None:
    """Prepare a process: its log, one thread, and a link of its own."""
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1)
    if size.links:
        leave_network()
        pipe.send(("unlinked",))
        pipe.recv()
    torch.set_num_threads(1)


def _job(size: Size, workload: Network) -> tuple[TrainJob, dict[str, Any]]:
    settings = {
        "workload.name": "members:Network",
        "batch.global_size": size.rows * size.ranks,
        "batch.drop_last": size.ranks > 8,  # BatchNorm needs two rows on each worker
        "optimizer.learning_rate": 1e-3,
        "stop.after": f"{size.steps} steps",
        "scale.workers": size.ranks,
        "scale.gpus_per_worker": 0,
        "scale.collective_timeout_s": size.timeout_s,
        "strategy.name": size.strategy,
        **({"checkpoint.memory.every": "1 step"} if size.holders else {}),
        "deterministic": True,
        "tracking.system_metrics": False,
        "checkpoint.every_minutes": None,
        "checkpoint.every": size.checkpoint_every and f"{size.checkpoint_every} steps",
        "evaluation.every": size.evaluation_every and f"{size.evaluation_every} steps",
    }
    config = load_config(flags=settings, environ={})
    sources = load_sources(workload)
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    return TrainJob(config, derive(config, splits[TRAIN].size), workload, splits, time.time()), sources


def _exit_with_report(file: Path) -> Callable[[int], None]:
    """An `os._exit` that first writes how a worker is stuck in its group: connections, and stacks of all threads."""
    leave = os._exit

    def report(code: int) -> None:
        if code == EXIT_CODE:
            with open(file, "w") as out:
                print(*psutil.Process().net_connections("tcp"), sep="\n", file=out, flush=True)
                faulthandler.dump_traceback(out)
        sys.stderr.flush()
        leave(code)

    return report
