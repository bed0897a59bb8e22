"""A training of emulated layers in which a fault begins when somebody says so: for `alerts.py` beside it.

The fault begins when a file `planted` appears in the folder. Compute is a timed sleep, so that two workers fit two cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scaleray import Workload
from scaleray.checkpoints.storage import Store
from scaleray.emulation import EmulatedLayer, EmulatedLink, Timing
from scaleray.training.health.system_metrics import SystemMetrics
from scaleray.training.profile.rank_samples import RankSamples

BUSY, IDLE = 0.9, 0.02
"""Share of time in which a GPU that there is not is busy, and in which it is not any more."""
WIDTH, LAYERS, FORWARD_S = 32, 4, 0.02
STRAGGLE_S, SLOWED_S, LINK_S, ROW_S, HANG_S = 0.04, 0.12, 0.06, 0.06, 200.0
LIMIT_BYTES, FILLED, KEPT_BYTES = 2**31, 0.97, 3 * 2**29
"""Memory that a worker is told it can have, the share of it that is filled, and what is kept for good."""
LEAK_BYTES = 2**18
"""What is kept of each step: 4 MB a second, which fills what the worker is told it has in some minutes."""


class Delay(torch.autograd.Function):
    """Identity that calls a function in its forward and in its backward pass, where it gives a factor for the
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Callable[[], None], backward: Callable[[], float]) -> torch.Tensor:
        ctx.later = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.later() * gradients[0], None, None


class Delayed(nn.Module):
    """A layer and what is called before its passes."""

    def __init__(self, layer: nn.Module, forward: Callable[[], None], backward: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self._calls = layer, (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Delay.apply(self.layer(x), *self._calls)
        return found


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Made-up rows, which are slow to read once input starves."""

    def __init__(self, starves: str | None) -> None:
        self.x = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
        self.starves = starves

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.starves is not None and os.path.exists(self.starves):
            time.sleep(ROW_S)
        return {"x": self.x[index], "y": int(self.x[index].argmax() % 2)}


class Planted(Workload):
    """fault: its name in `alerts.py`. folder: where `planted` appears, and where each rank writes its process."""

    def __init__(self, fault: str, folder: str) -> None:
        self.fault, self.folder = fault, folder
        self.sign = os.path.join(folder, "planted")
        self.link: EmulatedLink | None = None
        self.has_hit = False
        self.kept: list[np.ndarray] = []  # type: ignore[type-arg]

    def hits(self, fault: str, *, rank: int | None = None) -> bool:
        """Whether this fault acts now, and on this rank."""
        is_here = rank is None or not dist.is_initialized() or dist.get_rank() == rank
        return self.fault == fault and is_here and os.path.exists(self.sign)

    def prepare(self) -> None:
        """Plant in this process what is of no model."""
        if self.fault in ("memory", "leak"):
            # whoever samples has asked for the limit already
            setattr(RankSamples, "_limit", property(lambda self: LIMIT_BYTES, lambda self, value: None))  # noqa: B010
        if self.fault == "old checkpoint":
            slow_writes(self.sign)
        if self.fault == "gpus":
            made_up_gpu(self.sign)

    def build_model(self) -> nn.Module:
        self.prepare()
        rank = dist.get_rank() if dist.is_initialized() else 0
        Path(self.folder, f"process-{rank}").write_text(str(os.getpid()))
        if self.fault == "slow link" and self.link is None:
            self.link = emulated_link()

        def forward() -> None:
            if self.hits("hang", rank=1):
                time.sleep(HANG_S)
            if self.hits("slower") or self.hits("prediction"):
                time.sleep(SLOWED_S)
            if not self.kept and (self.hits("memory", rank=1) or self.hits("creep", rank=1)):
                used = psutil.Process().memory_info().rss
                size = KEPT_BYTES if self.fault == "creep" else int(FILLED * LIMIT_BYTES) - used
                self.kept.append(np.ones(size, np.uint8))
            if self.hits("leak", rank=1):
                self.kept.append(np.ones(LEAK_BYTES, np.uint8))

        def backward() -> float:
            if self.hits("straggler", rank=1):
                time.sleep(STRAGGLE_S)
            return math.inf if self.hits("loss scale") else 1.0

        timing = Timing(forward_s=FORWARD_S / LAYERS, jitter=0.1)
        layers: list[nn.Module] = [
            EmulatedLayer(WIDTH, timing, num_parameters=2**12, index=index) for index in range(LAYERS)
        ]
        layers[1] = Delayed(layers[1], forward, backward)
        return nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def datasets(self) -> dict[str, Any]:
        return {"train": Rows(self.sign if self.fault == "starvation" else None)}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.link is not None and self.hits("slow link"):
            self.link.latency_s = LINK_S
        if self.fault == "finished":
            Path(self.folder, "step").touch()
        if self.hits("failed", rank=1):
            raise RuntimeError("planted")
        found = model(batch["x"])
        if self.hits("explosion") and found.requires_grad:
            found.register_hook(lambda gradient: 1000 * gradient)
        loss = F.cross_entropy(found, batch["y"], reduction="sum")
        if self.hits("nan") and not self.has_hit:
            self.has_hit, loss = True, loss * float("nan")
        return (10 * loss if self.hits("spike") else loss), len(batch["y"])


def slow_writes(sign: str) -> None:
    """Let files of checkpoints take for ever to be written, once the sign is there."""
    write = Store.write

    def slow(self: Store, name: str, pieces: Any) -> tuple[str, int]:
        while os.path.exists(sign):
            time.sleep(1)
        return write(self, name, pieces)

    Store.write = slow  # type: ignore[method-assign]


def made_up_gpu(sign: str) -> None:
    """Let this process sample a GPU that there is not, busy until the sign is there."""
    sample = SystemMetrics.sample

    def sampled(self: SystemMetrics) -> dict[str, float]:
        busy = IDLE if os.path.exists(sign) else BUSY
        return {**sample(self), "gpu_0_utilization_percentage": 100 * busy}

    SystemMetrics.sample = sampled  # type: ignore[method-assign]


def emulated_link() -> EmulatedLink:
    """A link under the gradients of the next model that DDP wraps, as fast as there is one until it is told
    otherwise."""
    from scaleray.strategies import ddp

    link, real = EmulatedLink(bytes_per_s=1e12), ddp._wrapped

    def wrapped(*arguments: Any) -> Any:
        model = real(*arguments)
        model.register_comm_hook(None, link.reduce)
        return model

    ddp._wrapped = wrapped
    return link
