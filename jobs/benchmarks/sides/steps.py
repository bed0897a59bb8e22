"""One worker of the benchmark of a step's cost: trains when it is told to, by hand or with scaleray's loop.

python steps.py SIDE RANK WORLD_SIZE FILE     SIDE: plain or scaleray; FILE: where the workers of a group meet

Reads one task a line, `{"clips": true, "steps": 500, "warmup_steps": 100}`, to which `width` may be added, and answers with one line each: the CPU time
of its training thread and the time on the clock of every step, and the CPU time of the whole process. Both kinds of loop
are timed at the same place, the call of the loss.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Split, as_source
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing

WIDTH, NUM_CLASSES, ROWS = 64, 10, 4096
BATCH = 32
"""Rows of a worker in a step."""
CLIP_NORM = 1.0


class Toy:
    """Three layers: where they are small, what a step costs beside them is most of it. Notes the times of each call of
    the loss."""

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self.at: list[tuple[float, float, float]] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, self.width),
            nn.Tanh(),
            nn.Linear(self.width, self.width),
            nn.Tanh(),
            nn.Linear(self.width, NUM_CLASSES),
        )

    def datasets(self) -> dict[str, Any]:
        draw = np.random.default_rng(0)
        features = draw.standard_normal((ROWS, WIDTH), dtype=np.float32)
        return {TRAIN: {"x": features, "y": draw.integers(0, NUM_CLASSES, ROWS)}}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        self.at.append((time.thread_time(), time.perf_counter(), time.process_time()))
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def by_hand(workload: Toy, place: RankContext, *, clips: bool, steps: int) -> None:
    """Forward, backward, clipping and fused AdamW on batches that are there already, and nothing else."""
    torch.manual_seed(0)
    model = inner = workload.build_model()
    if place.world_size > 1:
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-3, fused=True)
    rows = {name: torch.from_numpy(values) for name, values in workload.datasets()[TRAIN].items()}
    batches = [{n: v[i : i + BATCH] for n, v in rows.items()} for i in range(0, ROWS, BATCH)]
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        total, count = workload.loss(model, batches[step % len(batches)])
        (total / count).backward()
        if clips:
            nn.utils.clip_grad_norm_(inner.parameters(), CLIP_NORM)
        optimizer.step()


def with_scaleray(workload: Toy, place: RankContext, *, clips: bool, steps: int) -> None:
    """The loop of a worker, with its checkpointing at hand, which has nothing to save."""
    flags: dict[str, Any] = {
        "workload.name": "steps:Toy",
        "strategy.name": "ddp",
        "batch.global_size": BATCH * place.world_size,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 1e-3,
        "optimizer.clip_norm": CLIP_NORM if clips else None,
        "stop.after": f"{steps} steps",
        "scale.workers": place.world_size,
        "checkpoint.every_minutes": None,
        "checkpoint.save_final": False,
        "tracking.system_metrics": False,
    }
    config = load_config(flags=flags, environ={})
    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    splits = {name: Split.of(name, source) for name, source in sources.items()}
    job = TrainJob(config, derive(config, DataSize(ROWS, None)), workload, splits, time.time())
    records: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        saves = Checkpointing(job, place, Catalog.of_run(folder), emit=records.append)
        loop.run(job, place, sources=sources, emit=records.append, checkpointing=saves)


SIDES = {"plain": by_hand, "scaleray": with_scaleray}


def measured(workload: Toy, steps: int, warmup_steps: int) -> dict[str, Any]:
    """Times of each step after the first ones, in milliseconds."""
    thread, clock, process = np.array(workload.at[-steps:])[warmup_steps:].T * 1000
    return {
        "thread_ms": np.diff(thread).tolist(),
        "clock_ms": np.diff(clock).tolist(),
        "process_ms": (process[-1] - process[0]) / (len(process) - 1),
    }


def main() -> None:
    side, rank, world_size, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    place = RankContext(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for line in sys.stdin:
        task = json.loads(line)
        workload = Toy(task.get("width", WIDTH))
        SIDES[side](workload, place, clips=task["clips"], steps=task["steps"])
        print(json.dumps(measured(workload, task["steps"], task["warmup_steps"])), flush=True)


if __name__ == "__main__":
    main()
