"""Small workloads that do one thing wrong, or one unusual thing right, for tests of whole runs."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from scaleray import Workload
from scaleray.training.health.worker_progress import Watchdog


class Line(Workload):
    """Linear regression on 64 rows: the smallest run that learns."""

    def __init__(self, rows: int = 64) -> None:
        self.rows = rows

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def datasets(self):
        generator = np.random.default_rng(0)
        x = generator.normal(size=(self.rows, 4)).astype(np.float32)
        y = x.sum(axis=1, keepdims=True)
        return {"train": {"x": x, "y": y}, "val": {"x": x[:10], "y": y[:10]}}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])


class Failing(Line):
    """Raises in the loss at one step of one rank (how: raise), or kills its process there (kill), or sleeps there (sleep), or
    raises in the backward pass (backward), which the look at the first batch has not; with `marker`, only the first time."""

    def __init__(
        self, rows: int = 64, *, how: str = "raise", at_call: int = 5, rank: int = 1, marker: str = ""
    ) -> None:
        super().__init__(rows)
        self.how, self.at_call, self.rank, self.marker = how, at_call, rank, marker
        self.calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.calls == self.at_call and rank == self.rank and not (self.marker and Path(self.marker).exists()):
            if self.marker:
                Path(self.marker).touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "sleep":
                time.sleep(600)  # others wait
            if self.how == "backward":
                total, count = super().loss(model, batch)
                total.register_hook(_raise)
                return total, count
            raise RuntimeError("the user's own mistake")
        return super().loss(model, batch)


def _raise(gradient):
    raise RuntimeError("the user's own mistake")


class Talking(Failing):
    """The same, and says every step. A process that is killed has told the recorder before in which step it is."""

    def loss(self, model, batch):
        if model.training:
            print(f"call {self.calls} of rank {torch.distributed.get_rank()}", flush=True)
            if self.calls == self.at_call - 1:
                wait_for_beats(2)  # the first of them may have been on its way before
        return super().loss(model, batch)


def wait_for_beats(number: int) -> None:
    """Wait until the recorder has taken so many more signs of life of this worker."""
    watchdog = next(o for o in gc.get_objects() if isinstance(o, Watchdog))
    taken, beat = [], watchdog.beat

    def counted(*values):
        wants_leave = beat(*values)
        taken.append(values)
        return wants_leave

    watchdog.beat = counted
    while len(taken) < number:
        time.sleep(0.01)


class Endless(Line):
    """Touches a file at every training step, so that a test knows that training runs."""

    def __init__(self, rows: int = 64, *, marker: str) -> None:
        super().__init__(rows)
        self.marker = marker

    def loss(self, model, batch):
        if model.training:
            Path(self.marker).touch()
        return super().loss(model, batch)


class SlowToSave(Endless):
    """The same, whose checkpoints take so many seconds from when the file `slow` is there."""

    def __init__(self, rows: int = 64, *, marker: str, slow: str, seconds: float) -> None:
        super().__init__(rows, marker=marker)
        self.slow, self.seconds = Path(slow), seconds

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_state_dict_pre_hook(self._take_time)
        return model

    def _take_time(self, *arguments):
        if self.slow.exists():
            time.sleep(self.seconds)


class Slow(Line):
    """Takes its time over every training step, so that something can happen in the middle of it."""

    def __init__(self, rows: int = 64, *, seconds: float = 0.05) -> None:
        super().__init__(rows)
        self.seconds = seconds

    def loss(self, model, batch):
        if model.training:
            time.sleep(self.seconds)
        return super().loss(model, batch)


class Meshed(Line):
    """Long rows, and a model of two units that may be sharded: says of each worker, in a folder, how those are laid out
    that hold the first one's weights."""

    def __init__(self, rows: int = 64, *, width: int = 4, folder: str) -> None:
        super().__init__(rows)
        self.width, self.folder = width, folder

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, 2), nn.Linear(2, 1))

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(self.rows, self.width)).astype(np.float32)
        y = x[:, :4].sum(axis=1, keepdims=True)
        return {"train": {"x": x, "y": y}, "val": {"x": x[:10], "y": y[:10]}}

    def loss(self, model, batch):
        mesh = getattr(next(model.parameters()), "device_mesh", None)
        if mesh is not None:
            layout = {"axes": mesh.mesh_dim_names, "ranks": mesh.mesh.tolist()}
            Path(self.folder, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(layout))
        return super().loss(model, batch)


class BadLabel(Line):
    """A classification whose labels go beyond the classes."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def datasets(self):
        data = super().datasets()["train"]
        return {"train": {"x": data["x"], "y": np.full(self.rows, 7)}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class FromParquet(Line):
    """The same rows from a Parquet folder."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def datasets(self):
        from scaleray import ParquetSource

        return {"train": ParquetSource(self.path)}


class Jittered(torch.utils.data.Dataset):
    """The rows of Line with noise from torch, numpy and `random`."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["x"])

    def __getitem__(self, index):
        noise = torch.rand(4).numpy() + np.float32(np.random.random() + random.random())
        return {"x": self.columns["x"][index] + noise, "y": self.columns["y"][index]}


class RandomTransforms(Line):
    """Line with random transforms in both splits."""

    def datasets(self):
        return {name: Jittered(columns) for name, columns in super().datasets().items()}


class FromRayDataset(Line):
    """The same rows from a Ray Dataset."""

    def datasets(self):
        import ray.data

        data = super().datasets()["train"]
        return {
            "train": ray.data.from_numpy(data["x"]).map_batches(
                lambda b: {"x": b["data"], "y": b["data"].sum(axis=1, keepdims=True)}
            )
        }


class Sweepable(Line):
    """A regression whose trials can fail, die or take their time. The counts begin anew with every object."""

    def __init__(
        self,
        rows: int = 64,
        *,
        fail_at: int = 0,
        kill_at: int = 0,
        rank: int = 0,
        marker: str = "",
        seconds: float = 0.0,
    ) -> None:
        super().__init__(rows)
        self.fail_at, self.kill_at, self.rank, self.marker, self.seconds = fail_at, kill_at, rank, marker, seconds
        self.calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        if model.training and self.seconds:
            time.sleep(self.seconds)
        if self.fail_at and self.calls == self.fail_at:
            raise RuntimeError("the user's own mistake")
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.kill_at and self.calls == self.kill_at and rank == self.rank and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
