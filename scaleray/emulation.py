"""Emulated accelerators for a machine that has none: a layer's compute is a timed sleep, and everything else is real.

A sleeping layer leaves its core and Python's lock free, as a GPU would, so that many workers on a few cores overlap and
wait as on a cluster: parameters, gradients, optimizer, collectives and input are those of any training. It serves to
test claims about scaling, overlap, stragglers and pipeline bubbles, and to rehearse runs. Use it in a workload:

    from scaleray.emulation import EmulatedLayer, Timing

    def build_model(self):
        timing = Timing(forward_s_per_sample=0.001, jitter=0.1, slowdown={1: 2.0})  # rank 1 is half as fast
        return nn.Sequential(*(EmulatedLayer(64, timing, index=i) for i in range(8)), nn.Linear(64, 10))

`emulate` adds the same sleeps to the modules of a model that computes. Memory, contention for a device, and kernel
speeds that depend on size are not emulated. A pass that autograd splits (zero bubble) sleeps in full in its part for
the inputs. For CPU workers only: on a GPU the sleep would block the launching thread, not the device."""

# no `from __future__ import annotations`: torch looks at the types that a communication hook is annotated with

import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scaleray.errors import ConfigError

FORWARD, BACKWARD, REDUCE = "forward", "backward", "reduce"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Compute time of a layer in seconds: a fixed part per pass, plus a part per sample (first dimension) in it.

    jitter: a pass takes between 1 - jitter and 1 + jitter times as long, drawn from (seed, pass, layer, rank), so that
    a second run sleeps for the same time. slowdown: factors by rank, for stragglers."""

    forward_s: float = 0.0
    forward_s_per_sample: float = 0.0
    backward_factor: float = 2.0
    """Ratio of the times of a backward and a forward pass: gradients of inputs and of weights cost one forward pass
    each."""
    jitter: float = 0.0
    seed: int = 0
    slowdown: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward_s", "forward_s_per_sample", "backward_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"Timing.{name}", getattr(self, name), "it must be 0 or more")
        if not 0 <= self.jitter < 1:
            raise ConfigError(
                "Timing.jitter", self.jitter, "it must be at least 0 and below 1", "0.1 is 10 % up or down"
            )
        slow = {rank: factor for rank, factor in self.slowdown.items() if not 0 < factor < math.inf}
        if slow:
            raise ConfigError("Timing.slowdown", slow, "factors must be above 0", "2 is half as fast")

    def duration_s(self, direction: str, *, num_samples: int, layer: int, number: int, rank: int) -> float:
        """Seconds of pass `number` (counted from 0) of a layer on a rank. direction: forward or backward."""
        name = f"{self.seed}/{number}/{layer}/{rank}/{direction}"
        draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64
        factor = 1 + self.jitter * (2 * draw - 1)
        if direction == BACKWARD:
            factor *= self.backward_factor
        return (self.forward_s + self.forward_s_per_sample * num_samples) * factor * self.slowdown.get(rank, 1.0)


@dataclass(frozen=True)
class Interval:
    """Interval in which a pass or a reduction ran. kind: forward, backward or reduce. index: number of the layer or
    bucket. number: number of the pass or step, from 0.

    Times are seconds of `time.perf_counter`, which on Linux is one clock for all processes of a machine."""

    kind: str
    index: int
    number: int
    start_s: float
    end_s: float


class Timeline:
    """Record of the intervals of one process, in the order in which they start. Layers and links write to it."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, int, int, list[float]]] = []

    def begin(self, kind: str, index: int, number: int) -> Callable[[], None]:
        """Record the start of an interval. Returns a function that records its end."""
        times = [time.perf_counter()]
        self._begun.append((kind, index, number, times))  # one append: other threads write too
        return lambda: times.append(time.perf_counter())

    def intervals(self, *kinds: str) -> list[Interval]:
        """Intervals that have ended, of these kinds or of all kinds, in the order in which they began."""
        done = [(kind, index, number, times) for kind, index, number, times in list(self._begun) if len(times) > 1]
        return [Interval(k, i, n, t[0], t[1]) for k, i, n, t in done if not kinds or k in kinds]

    def clear(self) -> None:
        """Remove all intervals."""
        self._begun.clear()

    def __deepcopy__(self, memo: Any) -> "Timeline":
        return self  # a copy of a model writes into the same


def busy_s(intervals: Iterable[Interval]) -> float:
    """Seconds during which at least one of the intervals is running."""
    total, reached = 0.0, -math.inf
    for interval in sorted(intervals, key=lambda i: i.start_s):
        total += max(0.0, interval.end_s - max(interval.start_s, reached))
        reached = max(reached, interval.end_s)
    return total


class EmulatedLayer(nn.Module):
    """Residual layer (..., width) -> (..., width) that takes the time of `timing` and hardly any arithmetic.

    It computes x + tanh(x) * mean of the rows of `weight`, (num_parameters / width, width). Every parameter has a
    gradient, so that collectives, optimizer and checkpoints carry as much data as for a real layer of that size. index:
    number of the layer, for its jitter and the timeline. rank: None takes that of the process group."""

    def __init__(
        self,
        width: int,
        timing: Timing,
        *,
        num_parameters: int | None = None,
        index: int = 0,
        rank: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(max(1, (num_parameters or width) // width), width) / width**0.5)
        self._sleeper = _Sleeper(timing, index, rank, timeline)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the sleep behind the arithmetic, so that in the backward pass it comes first: the layer's gradient is there
        # when its time is over, and not before
        return self._sleeper(x + torch.tanh(x) * self.weight.mean(dim=0))


def emulate(
    modules: Iterable[nn.Module], timing: Timing, *, rank: int | None = None, timeline: Timeline | None = None
) -> Callable[[], None]:
    """Make each of these modules take the time of `timing` in addition to its own. Returns a function that undoes this.

    Each module must return a tensor, or a tuple or list that begins with one. Raises ConfigError in the first pass
    otherwise."""
    hooks = [
        module.register_forward_hook(_after_forward(_Sleeper(timing, index, rank, timeline)))
        for index, module in enumerate(modules)
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def is_emulated(model: nn.Module) -> bool:
    """Whether any part of the model sleeps, instead of computing or in addition to it."""
    return any(
        isinstance(module, EmulatedLayer) or any(getattr(h, "sleeps", False) for h in module._forward_hooks.values())
        for module in model.modules()
    )


class EmulatedLink:
    """Emulated link for DDP's gradients: real all-reduces, each of which ends when a link of this bandwidth would have
    carried it.

    A bucket of n bytes takes latency_s + n / bytes_per_s, one bucket after another, during the backward pass. Use it as
    `model.register_comm_hook(group, link.reduce)`; gradients are averaged over the group. For buckets on the CPU."""

    def __init__(self, *, bytes_per_s: float, latency_s: float = 0.0, timeline: Timeline | None = None) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            text = f"needs bytes_per_s above 0 and latency_s of at least 0, not {bytes_per_s} and {latency_s}"
            raise ConfigError.problem("EmulatedLink", text)
        self.bytes_per_s, self.latency_s, self.timeline = bytes_per_s, latency_s, timeline or Timeline()
        self._transfers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._number = 0
        threading.Thread(target=self._carry, name="scaleray-link", daemon=True).start()

    def reduce(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the group's ranks. Returns a future of the mean. Collective."""
        buffer = bucket.buffer()
        end = self.timeline.begin(REDUCE, bucket.index(), self._number)
        self._number += bucket.is_last()
        buffer.div_(dist.get_world_size(group))
        # begun in this thread, so that all ranks begin their collectives in one order; waited for in the other
        work = dist.all_reduce(buffer, group=group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._transfers.put((work, buffer, end, future))
        return future

    def close(self) -> None:
        """End the thread of the link."""
        self._transfers.put(None)

    def _carry(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            work, buffer, end, future = transfer
            free_at = time.perf_counter() + self.latency_s + buffer.numel() * buffer.element_size() / self.bytes_per_s
            try:
                work.wait()
                _sleep_until(free_at)
                end()
                future.set_result(buffer)
            except Exception as exc:  # such as a lost peer: the backward pass raises it
                future.set_exception(exc)


class _Sleeper:
    """Makes one layer sleep, and counts its forward passes."""

    def __init__(self, timing: Timing, index: int, rank: int | None, timeline: Timeline | None) -> None:
        self.timing, self.index, self.rank, self.timeline = timing, index, rank, timeline
        self.number = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        number, self.number = self.number, self.number + 1
        slept: torch.Tensor = _Sleep.apply(x, self, number)
        return slept

    def sleep(self, direction: str, *, num_samples: int, number: int) -> None:
        rank = self.rank
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        started = time.perf_counter()
        end = self.timeline.begin(direction, self.index, number) if self.timeline is not None else lambda: None
        _sleep_until(
            started
            + self.timing.duration_s(direction, num_samples=num_samples, layer=self.index, number=number, rank=rank)
        )
        end()


class _Sleep(torch.autograd.Function):
    """Identity that sleeps in its forward and backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: "_Sleeper", number: int) -> torch.Tensor:
        ctx.sleeper, ctx.number, ctx.num_samples = sleeper, number, x.shape[0] if x.dim() else 1
        sleeper.sleep(FORWARD, num_samples=ctx.num_samples, number=number)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.sleeper.sleep(BACKWARD, num_samples=ctx.num_samples, number=ctx.number)
        return gradients[0], None, None


def _after_forward(sleeper: _Sleeper) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return sleeper(output)
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
            items = (sleeper(output[0]), *output[1:])
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)  # a named tuple
        found = f"returned {type(output).__name__}: it must return a tensor, or a tuple that begins with one"
        raise ConfigError.problem(f"the emulated {type(module).__name__}", found)

    hook.sleeps = True  # type: ignore[attr-defined] # for `is_emulated`
    return hook


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)  # gives up the core and Python's lock
