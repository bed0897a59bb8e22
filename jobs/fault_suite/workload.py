"""A small training that keeps a diary of the samples it used, and that hangs when told to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray import Callback, Workload

STOP = "stop"


class StopIfAsked(Callback):
    """Ends the training once a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step(self, run: Any) -> None:
        if self.file.exists():
            run.stop("its time is over")


class Recorded(Workload):
    """Classification with dropout and BatchNorm, so that every kind of state matters to the bits of the result.

    folder: for the diaries, one file a process, a line for every step before its backward pass. A file `hang-RANK` there makes that
    rank hang in its next step, and a file `stop` ends the training. pause_s: length of a step, long enough for a fault to hit a chosen one. plain: neither
    dropout nor BatchNorm, so that the result does not depend on the number of workers beyond rounding.
    """

    def __init__(self, folder: str, rows: int = 310, pause_s: float = 0.04, plain: bool = False) -> None:
        self.folder, self.rows, self.pause_s, self.plain = folder, rows, pause_s, plain
        self.steps = 0

    def build_model(self) -> nn.Module:
        if self.plain:
            return nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
        return nn.Sequential(
            nn.Linear(16, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 4),
        )

    def datasets(self) -> dict[str, dict[str, np.ndarray]]:
        generator = np.random.default_rng(7)
        x = generator.normal(size=(self.rows, 16)).astype(np.float32)
        label = (x[:, :4] + 0.3 * generator.normal(size=(self.rows, 4))).argmax(axis=1)
        rows = {"id": np.arange(self.rows), "x": x, "label": label}
        return {"train": rows, "val": {name: values[:50] for name, values in rows.items()}}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if model.training:
            self._hang_if_told()
        logits = model(batch["x"])
        total = nn.functional.cross_entropy(logits, batch["label"], reduction="sum")
        if model.training:  # used is what has gradients: the look at the first batch has none
            total.register_hook(lambda gradient: self._note_step(batch["id"].tolist()))
        return total, len(batch["label"])

    def callbacks(self) -> list[Callback]:
        return [StopIfAsked(Path(self.folder, STOP))]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def _note_step(self, ids: list[int]) -> None:
        self.steps += 1
        rank, size = _rank(), dist.get_world_size() if dist.is_initialized() else 1
        entry = {
            "step": self.steps,
            "rank": rank,
            "size": size,
            "process": os.getpid(),
            "time": time.time(),
            "ids": ids,
        }
        with open(Path(self.folder, f"used-{os.getpid()}.jsonl"), "a") as diary:
            diary.write(json.dumps(entry) + "\n")
        if self.steps % 10 == 1:
            print(f"training step {self.steps} on rank {rank}", flush=True)
        time.sleep(self.pause_s)

    def _hang_if_told(self) -> None:
        order = Path(self.folder, f"hang-{_rank()}")
        if order.exists():
            order.rename(Path(self.folder, f"hung-{_rank()}-{self.steps + 1}"))
            while True:
                time.sleep(0.1)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
