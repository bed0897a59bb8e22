"""The side of torchft in `recovery.py`: replicas of one process each, of which a killed one is started again."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fault_suite.members import Network, Size, enter
from fault_suite.spared import SparedTraining

from scaleray.data import StepPlan

JOIN_MS, TICK_MS, HEARTBEAT_MS, TIMEOUT_S = 1000, 50, 1000, 20.0


class Replicas(SparedTraining):
    """A training with torchft. A replica that was killed begins again at once, in a process that has torch already."""

    def begin(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=JOIN_MS,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=HEARTBEAT_MS,
        )
        self.ranks: dict[int, int] = {}
        self.parts: dict[int, int] = {}
        """Replicas in the last step of each process."""
        self.partial_steps: set[int] = set()
        for rank in range(self.size.ranks):
            self._add(rank)
        self.wait_for(lambda: len(self.ready) == self.size.ranks, "replica")
        for _, pipe in self.running.values():
            pipe.send("begin")  # together, else the first steps are those of the first replica

    @property
    def members(self) -> dict[int, int]:
        return {rank: number for number, rank in self.ranks.items() if number in self.running}

    @property
    def is_whole(self) -> bool:
        return sum(self.parts.get(number) == self.size.ranks for number in self.running) == self.size.ranks

    def close(self) -> None:
        super().close()
        self.lighthouse.shutdown()

    def _add(self, rank: int) -> None:
        number = next(self._numbers)
        self.ranks[number] = rank
        self._start(number, run_replica, rank, self.lighthouse.address(), self.size, str(self.folder))

    def _receive_other(self, number: int, kind: str, values: Any) -> None:
        step, participants = values
        self.parts[number] = participants
        if participants < self.size.ranks:
            self.partial_steps.add(step)

    def _gone(self, number: int) -> None:
        self._end(number)
        if not self.weights:
            self._add(self.ranks[number])
            self.running[max(self.running)][1].send("begin")


def run_replica(rank: int, lighthouse: str, size: Size, folder: str, pipe: Any) -> None:
    """The process of a replica."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    enter(size, pipe, Path(folder, f"replica-{rank}.log"))
    workload, rows = Network(), Network().datasets()["train"]
    torch.manual_seed(0)
    model = workload.build_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_S)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=limit,
        quorum_timeout=2 * limit,
    )
    module, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    plan = StepPlan(num_samples=len(rows["y"]), global_batch_size=96, seed=0, drop_last=True)
    pipe.send(("ready",))
    pipe.recv()
    while (step := manager.current_step()) < size.steps:
        own = plan.global_indices(step)[rank :: size.ranks]
        torch.manual_seed(step * size.ranks + rank)  # so that dropout follows from the step
        optimizer.zero_grad()
        loss = F.cross_entropy(module(torch.from_numpy(rows["x"][own])), torch.from_numpy(rows["y"][own]))
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            pipe.send(("part", step + 1, manager.num_participants()))
            pipe.send(("step", step + 1, time.time()))
    content = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    pipe.send(("end", rank, hashlib.sha256(content).hexdigest()))
    time.sleep(0.5)  # others may be in their last step
    manager.shutdown(wait=False)
