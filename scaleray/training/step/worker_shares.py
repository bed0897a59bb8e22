"""Shares of the global batch that follow the speed of each worker, measured during the training.

A worker's speed is its samples divided by the seconds from the beginning of its step, when its input is ready, to its
last gradient. Other workers cannot delay this, since no worker communicates in the meantime. The one exception is that
DDP synchronises a model's buffers before the first forward pass; the clock then starts after that. The measured time
covers the worker's own work: forward and backward passes of all its micro-batches, and copies to the device. Limits:
the optimizer's update, which is the same for all, is not included; on shared machines, reductions of other workers use
some of the cores; and for a workload that communicates in its own loss, waiting is included.

The fixed part of a micro-batch's time makes a speed depend on the share at which it was measured. The shares still
converge correctly: they are stable only when all workers finish together."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scaleray.config import RunConfig
from scaleray.config.recipe.shares import described, equal_shares, is_worth_it, shares_by_speed, smoothed
from scaleray.config.recipe.values import Recipe
from scaleray.training.setup.rank_context import RankContext

MEASURED_STEPS = 16  # steps before a measurement is taken; their median leaves out a checkpoint or a hiccup


class WorkerShares:
    """Shares of all workers, which change only with `shares.by speed`.

    before: `state` in a checkpoint. now: samples of a full batch by rank; None means equal shares."""

    def __init__(
        self, config: RunConfig, recipe: Recipe, place: RankContext, before: Mapping[str, Any] | None = None
    ) -> None:
        self._settings, self._recipe, self._place = config.shares, recipe, place
        self.now: tuple[int, ...] | None = recipe.worker_shares
        self.speeds: tuple[float, ...] | None = None
        if self._follows_speed and before is not None and len(before["speeds"]) == place.world_size:
            self.speeds = tuple(before["speeds"])
            self.now = tuple(before["shares"])
            if sum(self.now) != recipe.global_batch_size:
                self.now = self._by(self.speeds)
        self._meter: ComputeMeter | None = None
        self._measured: list[tuple[int, Any]] = []

    @property
    def _follows_speed(self) -> bool:
        return self._recipe.measure_shares_every_steps is not None

    def first_words(self, *, deterministic: bool) -> list[tuple[str, bool]]:
        """Warnings and notes about unequal shares, each with a flag that marks it as a warning."""
        words = [(described(self.now, self.speeds), False)] if self.now is not None else []
        if deterministic and self._follows_speed:
            warning = (
                "shares follow measured times, so another run sums the same samples in other groups: results are "
                "equal up to rounding, not to the bit"
            )
            words.append((warning, True))
        return words

    def watch(self, module: nn.Module) -> None:
        """Measure the training of this module from now on, if shares follow the speed."""
        if self._follows_speed:
            self._meter = ComputeMeter(module, self._place.device)

    def begin_step(self, step: int) -> None:
        """Begin step `step`, counted from 1, on this rank once its batch is available."""
        every = self._recipe.measure_shares_every_steps
        if self._meter is not None and every is not None and (-step) % every < MEASURED_STEPS:
            self._meter.begin()

    def end_step(self, step: int, num_rows: int) -> str | None:
        """End the step, which had this many rows of this rank. Logs a change of the shares from the next step on.

        Collective in every `measure_every`-th step; all ranks get the same result."""
        if self._meter is None:
            return None
        found = self._meter.end()
        if found is not None and num_rows:
            self._measured.append((num_rows, found))
        every = self._recipe.measure_shares_every_steps
        if every is None or step % every or step >= self._recipe.total_steps:
            return None
        return self._decide()

    def state(self) -> dict[str, Any] | None:
        """State for a checkpoint, so that a resumed training continues with the same shares."""
        if self.speeds is None:
            return None
        return {"speeds": list(self.speeds), "shares": list(self.now or self._equal)}

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._meter is not None:
            self._meter.close()

    def _decide(self) -> str | None:
        place = self._place
        mine = [0.0] * place.world_size
        mine[place.rank] = self.measured_speed()
        self._measured.clear()
        # a sum of one number and zeros: every rank has the same bits, and decides alike
        self.speeds = smoothed(place.all_reduce(mine), self.speeds)
        if self.speeds is None:
            return None
        shares = self._by(self.speeds)
        if not is_worth_it(shares, self.now or self._equal, self.speeds):
            return None
        self.now = shares
        return described(shares, self.speeds)

    def measured_speed(self) -> float:
        """Samples per second that this rank has computed since the last measurement; 0 if it had none to compute."""
        times = [self._meter.seconds(found) / rows for rows, found in self._measured] if self._meter else []
        median = statistics.median(times) if times else 0.0
        return 1.0 / median if median > 0 else 0.0

    def _by(self, speeds: tuple[float, ...]) -> tuple[int, ...]:
        return shares_by_speed(speeds, total=self._recipe.global_batch_size, smallest=self._settings.smallest)

    @property
    def _equal(self) -> tuple[int, ...]:
        return equal_shares(self._place.world_size, total=self._recipe.global_batch_size)


class ComputeMeter:
    """Measures the time from the beginning of a step to this rank's last gradient, on the device's own clock."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._is_on, self._num_steps = False, 0
        self._start: Any = None
        self._end: Any = None
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_gradient) for p in module.parameters() if p.requires_grad
        ]
        if next(module.buffers(), None) is not None:
            self._hooks.append(module.register_forward_pre_hook(self._on_forward))

    def begin(self) -> None:
        """Begin a step."""
        self._is_on, self._has_forward = True, False
        self._start, self._end = self._mark(), None

    def end(self) -> Any:
        """End the step. Returns the argument for `seconds`, or None for the first step and for a step that is not
        measured."""
        was_on, self._is_on = self._is_on, False
        if not was_on or self._end is None:
            return None
        self._num_steps += 1
        # the first one compiles, and fills caches
        return (self._start, self._end) if self._num_steps > 1 else None

    def seconds(self, found: Any) -> float:
        """Seconds of a measured step; on a GPU this waits for the device."""
        start, end = found
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_on:
            self._end = self._mark(self._end)  # the last one counts

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._is_on and not self._has_forward:
            self._has_forward = True
            self._start = self._mark(self._start)

    def _mark(self, event: Any = None) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = event or torch.cuda.Event(enable_timing=True)
        event.record()
        return event
