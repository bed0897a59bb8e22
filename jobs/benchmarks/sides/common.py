"""What every hand-written side shares, so that they differ in nothing but their library.

The task (workload, optimizer, order of samples), the rows as a torch Dataset, and a stopwatch around the steps.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaleray.data import StepPlan, as_source
from scaleray.workload import load_workload

REPOSITORY = Path(__file__).resolve().parents[3]
STEPS_OF_FINAL_LOSS = 20


@dataclass(frozen=True)
class Task:
    """What to train, as `training.py` wrote it down. `result` is the start of the paths that the ranks write to."""

    workload: str
    workload_args: dict[str, Any]
    world_size: int
    global_batch_size: int
    steps: int
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip_norm: float
    seed: int
    loader_workers: int
    result: str

    @property
    def batch_size(self) -> int:
        """Samples of one rank in one step."""
        return self.global_batch_size // self.world_size

    @property
    def warmup_steps(self) -> int:
        """Steps left out of the steady state: the first 20 %, at least 10. scaleray's own record uses the same rule."""
        return max(10, self.steps // 5)

    def build_workload(self) -> Any:
        """The workload, built anew. Relative paths are looked up in the repository, as Ray changes the directory."""
        return load_workload(self.workload, self.workload_args, base_dir=REPOSITORY)

    def adamw(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        """The optimizer, as a user writes it."""
        return torch.optim.AdamW(
            parameters, lr=self.learning_rate, betas=self.betas, eps=self.epsilon, weight_decay=self.weight_decay
        )

    def plan(self, num_rows: int) -> StepPlan:
        """The order of samples that scaleray uses for the same seed."""
        return StepPlan(num_rows, self.global_batch_size, seed=self.seed, drop_last=True)


def read_task() -> Task:
    """The task of the file named on the command line."""
    return Task(**json.loads(Path(sys.argv[1]).read_text()))


def training_columns(workload: Any) -> dict[str, np.ndarray]:
    """All training rows in memory; a token source becomes its windows."""
    source = as_source(workload.datasets()["train"], split="train")
    return source.read(np.arange(source.num_rows))


class Rows(torch.utils.data.Dataset):
    """Columns in memory as a map-style Dataset."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = {name: torch.from_numpy(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


class PlanSampler(torch.utils.data.Sampler[int]):
    """The samples of one rank in scaleray's order; in place of DistributedSampler."""

    def __init__(self, plan: StepPlan, *, rank: int, world_size: int) -> None:
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As in DistributedSampler: choose the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.plan.global_batch_size // self.world_size

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self.plan.steps_per_epoch
        for step in range(first, first + self.plan.steps_per_epoch):
            yield from self.plan.rank_indices(step, self.rank, self.world_size).tolist()


def data_loader(task: Task, rows: Rows, sampler: PlanSampler) -> torch.utils.data.DataLoader:
    """A DataLoader of one rank's batches; its workers, if any, live on over epochs."""
    return torch.utils.data.DataLoader(
        rows,
        batch_size=task.batch_size,
        sampler=sampler,
        num_workers=task.loader_workers,
        persistent_workers=task.loader_workers > 0,
    )


class Stopwatch:
    """Times one rank's steps. Reads no tensor before the end, so that it does not make the training wait."""

    def __init__(self, task: Task, *, rank: int) -> None:
        self.task, self.rank = task, rank
        self.ends: list[float] = []
        self.waits: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.first_step_at = math.nan

    @property
    def is_done(self) -> bool:
        """Whether all steps of the task have run."""
        return len(self.ends) >= self.task.steps

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One pass over the loader, ended early when all steps have run; notes how long each batch was waited for."""
        waited_since = time.perf_counter()
        batches = iter(loader)
        while not self.is_done:
            batch = next(batches, None)
            if batch is None:
                break
            self.waits.append(time.perf_counter() - waited_since)
            yield batch
            waited_since = time.perf_counter()

    def step_done(self, loss: torch.Tensor) -> None:
        """Call after each optimizer step with this rank's mean loss."""
        if not self.ends:
            self.first_step_at = time.time()
        self.ends.append(time.perf_counter())
        self.losses.append(loss.detach())

    def write(self) -> None:
        """Write this rank's figures."""
        first, steps = self.task.warmup_steps, self.task.steps
        steady_s = self.ends[steps - 1] - self.ends[first - 1]
        clock = self.first_step_at - self.ends[0]
        figures = {
            "samples_per_s": (steps - first) * self.task.global_batch_size / steady_s,
            "input_wait_share": sum(self.waits[first:steps]) / steady_s,
            "first_step_at": self.first_step_at,
            "steady_at": [clock + self.ends[first - 1], clock + self.ends[steps - 1]],
            "final_loss": torch.stack(self.losses[-STEPS_OF_FINAL_LOSS:]).mean().item(),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
        }
        Path(f"{self.task.result}.{self.rank}.json").write_text(json.dumps(figures))
