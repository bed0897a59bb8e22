"""What is planted in a training, and how: a model that sleeps in place of computing, and what sleeps longer."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scaleray.common.callbacks import Callback
from scaleray.data import TRAIN
from scaleray.emulation import EmulatedLayer, EmulatedLink, Timing
from scaleray.profiling.verdict.findings import Limit
from scaleray.records.phases import Phase
from scaleray.strategies import ddp
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step import micro_batches

WIDTH, BATCH, STEPS, EVERY = 32, 8, 36, 5
LAYER_PARAMETERS = 2**12
ROW_BYTES = 4 * WIDTH + 8
CHECKPOINT_S = 0.03
"""What a checkpoint takes without a fault, about."""
FIRST_BATCHES = 10
"""Of slow readers: a rank reads three ahead, and the first 11 steps do not count."""
STRATEGIES = ("ddp", "fsdp", "zero1")
FORWARD_S = 0.02
"""Of the whole model; a backward pass takes twice as long."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that makes a training slower, and what a verdict should say of it.

    limit: the class. phase: of a straggler. more: other classes, one of which may be the second finding.
    """

    name: str
    limit: Limit
    planted: str
    phase: Phase | None = None
    has_bucket: bool = False
    names_rank: bool = False
    more: tuple[Limit, ...] = ()


FAULTS = (
    Fault("healthy", Limit.COMPUTE, "nothing"),
    Fault("slow reader", Limit.INPUT, "reading the rows of a batch sleeps longer than a step takes"),
    Fault("slow decode on one rank", Limit.INPUT, "the same, on one rank", names_rank=True),
    Fault(
        "slow copy to the device",
        Limit.COPY,
        "emulated: tensors of a batch come that much later on all ranks, as over a slow bus: the CPU has none",
    ),
    Fault("python overhead", Limit.HOST, "a callback sleeps after every step"),
    Fault(
        "device synchronisation",
        Limit.HOST,
        "emulated: a callback stands still after every step as long as a device would need to run dry and start again",
    ),
    Fault(
        "pauses of the garbage collector",
        Limit.HOST,
        "emulated: real collections every 5 steps, made longer by sleeping",
    ),
    Fault(
        "slow link, emulated",
        Limit.COMMUNICATION,
        "emulated: each collective of the step ends that much later on all ranks",
    ),
    Fault(
        "slow link, tc", Limit.COMMUNICATION, "real: the kernel's token bucket (`tc tbf`) on the link between the ranks"
    ),
    Fault("straggler in forward", Limit.STRAGGLER, "a layer's forward pass sleeps on one rank", Phase.FORWARD),
    Fault(
        "straggler in backward",
        Limit.STRAGGLER,
        "a layer's backward pass sleeps on one rank",
        Phase.BACKWARD,
        has_bucket=True,
    ),
    Fault("straggler in optimizer", Limit.STRAGGLER, "the optimizer's step sleeps on one rank", Phase.OPTIMIZER),
    Fault(
        "synchronous checkpoint",
        Limit.CHECKPOINT,
        "checkpoint.is_asynchronous false every 5 steps, and sleeping as on a slow disk",
    ),
    Fault("heavy evaluation", Limit.EVALUATION, "an evaluation every 5 steps"),
    Fault(
        "memory retries",
        Limit.MEMORY,
        "emulated: every 5th step sleeps in its backward pass, and the allocator's statistics are made up to match",
    ),
    Fault(
        "two at once",
        Limit.STRAGGLER,
        "a straggler in forward, and lighter evaluations",
        Phase.FORWARD,
        more=(Limit.EVALUATION,),
    ),
)
IMPACTS = (0.2, 0.08, -1.0)
"""Measured shares by which a fault makes steps longer, from which on trainings are told together. Planted ones are
sizes of delays, of which a part may hide; the smallest are below what a verdict tells of."""
REAL_LINK, IN_NAMESPACE = "slow link, tc", "VERDICTS_IN_NAMESPACE"
BY_NAME = {fault.name: fault for fault in FAULTS}


class Delay(torch.autograd.Function):
    """Identity that sleeps in its forward or its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> torch.Tensor:
        ctx.backward_delay = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward_delay()
        return gradients[0], None, None


class Delayed(nn.Module):
    """An emulated layer and delays of its passes. The delay of a backward pass comes before the layer's gradient."""

    def __init__(self, layer: nn.Module, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self._forward, self._backward = layer, forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Delay.apply(self.layer(x), self._forward, self._backward)
        return found


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Made-up rows, of which each takes so long to read, and the first ones twice that: so that what was read ahead is
    used up before the steps that count, as it is in a training of any length."""

    def __init__(self, count: int, row_s: float) -> None:
        self.x = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
        self.row_s, self.jitter, self.num_first = row_s, random.Random(), FIRST_BATCHES * BATCH // 2

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.row_s:
            self.num_first -= 1
            time.sleep((2 if self.num_first >= 0 else 1) * self.row_s * self.jitter.uniform(0.5, 1.5))
        return {"x": self.x[index], "y": int(self.x[index].argmax() % 2)}


class Planted:
    """A stack of emulated layers with a fault. settings: see `cases`."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.name, self.delay_s = settings["fault"], settings["size"] * settings["step_s"]
        self.is_culprit = rank == settings["rank"]
        self.evaluation_every = 2 * EVERY if self.name == "two at once" else EVERY
        self.number = 0

    def sleeps(
        self, where: str, *, every: int = 1, on: bool = True, share: float = 1.0, less_s: float = 0.0
    ) -> Callable[[], None]:
        """What sleeps in this place: only where the fault is planted there, and in steps that it hits."""
        if self.name != where or not on:
            return lambda: None
        calls = 0

        def sleep() -> None:
            nonlocal calls
            calls += 1
            if calls % every == 0:
                time.sleep(max(0.0, share * every * self.delay_s - less_s))

        return sleep

    def build_model(self) -> nn.Module:
        settings, culprit = self.settings, self.is_culprit
        count = settings["layers"]
        layers = []
        for index in range(count):
            timing = Timing(forward_s=FORWARD_S / count, jitter=0.1, seed=settings["seed"])
            layer: nn.Module = EmulatedLayer(
                WIDTH, timing, num_parameters=LAYER_PARAMETERS, index=index, rank=self.rank
            )
            is_hit = index == settings["layer"]
            forward = "two at once" if self.name == "two at once" else "straggler in forward"
            backward = self.sleeps("straggler in backward", on=culprit and is_hit)
            if self.name == "memory retries":
                backward = self.sleeps("memory retries", every=EVERY, on=is_hit)
            layer = Delayed(layer, self.sleeps(forward, on=culprit and is_hit), backward)
            layers.append(layer)
        return nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def datasets(self) -> dict[str, Any]:
        reads_slowly = self.name == "slow reader" or (self.name == "slow decode on one rank" and self.is_culprit)
        # rows are read beside the training: the batch takes longer than the whole step by the planted share
        row_s = (self.settings["step_s"] + self.delay_s) / (BATCH // 2) if reads_slowly else 0.0
        found: dict[str, Any] = {TRAIN: Rows(4096, row_s)}
        if self.name in ("heavy evaluation", "two at once"):
            share = 0.4 if self.name == "two at once" else 1.0
            # an evaluation is that many forward passes
            passes = max(1, round(share * self.evaluation_every * self.delay_s / FORWARD_S))
            found["val"] = Rows(passes * BATCH, 0.0)
        return found

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.name == "pauses of the garbage collector" and torch.is_grad_enabled():
            self.number += 1
            if self.number % EVERY == 0:
                gc.collect(0)
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def callbacks(self) -> list[Callback]:
        return [Waits(self)]

    def link(self) -> EmulatedLink | None:
        """The slow link between the ranks; None where none is planted."""
        if self.name != "slow link, emulated":
            return None
        # a bucket that takes no longer than a layer's backward pass is hidden behind it, but for the last one
        count = self.settings["layers"]
        hidden_s = 2 * FORWARD_S / count
        bucket_s = min(self.delay_s, (self.delay_s + (count - 1) * hidden_s) / count)
        return EmulatedLink(bytes_per_s=1e12, latency_s=max(bucket_s, min(self.delay_s, hidden_s)))


class Waits(Callback):
    """What sleeps between two steps."""

    def __init__(self, planted: Planted) -> None:
        self.after_step = [planted.sleeps(name) for name in ("python overhead", "device synchronisation")]
        self.saving = planted.sleeps("synchronous checkpoint", share=EVERY, less_s=CHECKPOINT_S)

    def on_step(self, run: Any) -> None:
        for sleep in self.after_step:
            sleep()

    def on_checkpoint(self, run: Any) -> None:
        self.saving()


@contextlib.contextmanager
def planted_around(planted: Planted, place: RankContext) -> Iterator[None]:
    """What is planted outside the model: in every optimizer, in the garbage collector, in DDP's link."""
    undo: list[Callable[[], None]] = []
    if planted.name == "straggler in optimizer":
        sleep = planted.sleeps(planted.name, on=planted.is_culprit)
        hook = register_optimizer_step_pre_hook(lambda *_: sleep())
        undo.append(hook.remove)
    if planted.name == "pauses of the garbage collector":
        longer = planted.sleeps(planted.name, every=1, share=EVERY)

        def pause(phase: str, info: dict[str, int]) -> None:
            if phase == "stop" and info["generation"] == 0 and planted.number % EVERY == 0 and planted.number:
                longer()

        gc.callbacks.insert(0, pause)  # before whoever measures the end of a collection
        gc.disable()  # those that are planted are the only ones
        undo += [lambda: gc.callbacks.remove(pause), gc.enable]
    if planted.name == "slow copy to the device":
        copied, wait = micro_batches.to_device, planted.sleeps(planted.name)

        def to_device(*arguments: Any) -> dict[str, torch.Tensor]:
            if torch.is_grad_enabled():
                wait()
            return copied(*arguments)

        setattr(micro_batches, "to_device", to_device)  # noqa: B010 - the types differ in their names alone
        undo.append(lambda: setattr(micro_batches, "to_device", copied))
    if (link := planted.link()) is not None:
        real = ddp._wrapped

        def wrapped(*arguments: Any) -> Any:
            model = real(*arguments)
            model.register_comm_hook(None, link.reduce)
            return model

        ddp._wrapped = wrapped
        undo += [link.close, lambda: setattr(ddp, "_wrapped", real)]
    try:
        yield
    finally:
        for each in undo:
            each()
