"""Communication hook for DDP that compresses each bucket of gradients, and the state it carries from step to step.

The residual of a rank is added to its next gradient (error feedback) if the method loses more than rounding. It is
stored by parameter, since DDP rebuilds its buckets after the first step. The codecs are in `codecs`."""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaleray.common import metric_names
from scaleray.config import RunConfig
from scaleray.config.compression import CompressionSettings
from scaleray.strategies.compression.adaptive import WHOLE, Review, review, summary
from scaleray.strategies.compression.codecs import Cast, Codec, Int8, Layout, Part, PowerSGD, TopK, Whole
from scaleray.strategies.contract.numbers import Number, Truth, as_factor, choose
from scaleray.strategies.contract.parallel import Tensors
from scaleray.strategies.traffic.collectives_log import GroupCollectives

# A thread or stream next to the backward pass in which buckets are processed, one after another in the order in which
# they come.
#
# A hook that continues in a future's callback would start its next collective whenever the last one happens to end:
# with gloo that is another order on every rank, and ranks would mix up their buckets.

Work = Callable[[], torch.Tensor]


class CommunicationThread:
    """A thread on the CPU; on CUDA a stream, on which collectives are only queued while the host continues. The CUDA
    code has been reviewed but not run. `close` ends the thread, as does garbage collection."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future] | None] = queue.SimpleQueue()
        self.close = weakref.finalize(self, self._waiting.put, None)
        if self.stream is None:
            threading.Thread(target=_serve, args=(self._waiting,), name="scaleray-gradients", daemon=True).start()

    def submit(self, work: Work) -> torch.futures.Future[torch.Tensor]:
        """Run `work` after all earlier work, and return a future of its result. Waiting for it raises errors of
        `work`."""
        if self.stream is None:
            done: torch.futures.Future = torch.futures.Future()
            self._waiting.put((work, done))
            return done.then(_result)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            ready: torch.futures.Future = torch.futures.Future(devices=[self.device])
            ready.set_result(work())
        return ready


def _serve(waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future] | None]) -> None:
    while (item := waiting.get()) is not None:
        work, done = item
        try:
            with torch.no_grad():
                result: object = work()
        except BaseException as exc:
            result = exc
        done.set_result(result)
        del item, work, done, result  # while waiting, hold nothing that belongs to others


def _result(done: torch.futures.Future) -> torch.Tensor:
    # DDP waits in C++, which takes a future's exception for its value; only one raised here it sees as an error
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, torch.Tensor)
    return result


CODECS: dict[str, Callable[[CompressionSettings], Codec]] = {
    WHOLE: lambda settings: Whole(),
    "fp16": lambda settings: Cast(torch.float16),
    "bf16": lambda settings: Cast(torch.bfloat16),
    "int8": lambda settings: Int8(settings.block_size),
    "powersgd": lambda settings: PowerSGD(settings.rank),
    "topk": lambda settings: TopK(settings.density),
}
WITHOUT_FEEDBACK = (WHOLE, "fp16", "bf16")
LEFT, THIN, STEPS = "left", "thin", "steps"


class Compression:
    """The hook of one DDP model, registered on creation. `model` is the user's model inside it. Collective.

    A parameter that no rank used in a step has no gradient, and values sent for it in that step are lost."""

    def __init__(
        self, wrapped: DistributedDataParallel, model: nn.Module, group: dist.ProcessGroup, config: RunConfig
    ) -> None:
        settings = config.compression
        self.settings = settings
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {parameter: name for name, parameter in named.items()}
        device = next(iter(named.values())).device
        # On the CPU this is a thread, while DDP's own collectives come from the thread that trains: in one group,
        # each rank would match them in another order. On CUDA one thread starts both.
        self._own_group = None
        if device.type == "cpu":
            limit = timedelta(seconds=config.scale.collective_timeout_s)  # torch's default is half an hour
            self._own_group = dist.new_group(dist.get_process_group_ranks(group), timeout=limit)
        self.collectives = GroupCollectives(self._own_group or group)
        self.thread = CommunicationThread(device)
        chosen = settings.allowed if settings.name == "adaptive" else (settings.name,)
        self.codecs = {name: CODECS[name](settings) for name in dict.fromkeys((*chosen, WHOLE))}
        self._has_feedback = settings.name == "adaptive" or settings.name not in WITHOUT_FEEDBACK
        self._left = _LeftOver(named) if self._has_feedback else None
        self._keeps_last = config.precision.dtype == "fp16" or config.on_nonfinite == "skip"
        """Whether training may continue after a skipped step, so that the residual it used must be restored."""
        self._steps = torch.zeros((), dtype=torch.int64)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._choices: dict[tuple[str, ...], str] = {}
        self._reviews: dict[tuple[str, ...], Review] = {}
        self._said = ""
        self._sent_by: dict[str, int] = {}
        self._whole_bytes, self._sent_before = 0, 0
        self.metrics: dict[str, float] = {}
        self.notes = self._first_notes(named)
        wrapped.register_comm_hook(None, lambda state, bucket: self._hook(bucket))

    def _hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        if names not in self._layouts:
            parameters = bucket.parameters()
            dtype = computed_in(bucket.buffer().dtype)
            self._layouts[names] = _layout(dict(zip(names, parameters, strict=True)), dtype)
        return self.thread.submit(partial(self._average, bucket.buffer(), names))

    def _average(self, buffer: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        """Replace the bucket by its mean over all ranks. Runs in the communication thread."""
        layout = self._layouts[names]
        self._whole_bytes += buffer.numel() * buffer.element_size()
        if int(self._steps) < self.settings.start_step:
            self.collectives.mean_(buffer)
            self._sent_by[WHOLE] = self._sent_by.get(WHOLE, 0) + buffer.numel() * buffer.element_size()
            return buffer
        values = buffer.to(computed_in(buffer.dtype))  # the bucket itself, unless that has 16 bits
        if self._left is not None:
            left = self._left.of(names)
            if self._keeps_last:
                self._left.remember(names)
            values.add_(left)
        method = self._method(values, layout, names)
        lost = self.codecs[method].mean_(values, self.collectives, layout)
        if self._left is not None:
            left.copy_(lost)
        if values is not buffer:
            buffer.copy_(values)
        self._sent_by[method] = self._sent_by.get(method, 0) + buffer.numel() * buffer.element_size()
        return buffer

    def _method(self, values: torch.Tensor, layout: Layout, names: tuple[str, ...]) -> str:
        settings = self.settings
        if settings.name != "adaptive":
            return settings.name
        is_due = (int(self._steps) - settings.start_step) % settings.review_every == 0
        if names not in self._choices or is_due:
            allowed: dict[str, Codec] = {name: self.codecs[name] for name in settings.allowed}
            found = review(values, layout, allowed, self.collectives, max_error=settings.max_error)
            if not found.is_finite:  # nothing to judge by: look again in the next step
                self._choices.pop(names, None)
                return WHOLE
            self._choices[names] = found.chosen.name if found.chosen else WHOLE
            self._reviews[names] = found
        return self._choices[names]

    def carry_over(self, factor: Number, was_taken: Truth) -> None:
        """See `Parallel.carry_over`."""
        if self._left is not None:
            self._left.carry_over(factor, was_taken=was_taken)

    def after_update(self, step: int) -> None:
        """Set the metrics of the completed optimizer step `step`."""
        self._steps.fill_(step)
        sent, self._sent_before = self.collectives.sent_bytes - self._sent_before, self.collectives.sent_bytes
        whole = max(1, self._whole_bytes)
        self.metrics = {metric_names.COMPRESSION_RATIO.name: sent / whole}
        if self.settings.name == "adaptive":
            shares = {metric_names.compression_share(name).name: 0.0 for name in self.codecs}
            self.metrics.update(shares)
            self.metrics.update({metric_names.compression_share(n).name: b / whole for n, b in self._sent_by.items()})
        self._sent_by, self._whole_bytes = {}, 0
        if self._reviews:
            chosen = summary([(self._layouts[names], found) for names, found in self._reviews.items()])
            if chosen != self._said:
                links = sorted(found.link.bytes_per_s * 8e-6 for found in self._reviews.values())
                link = f"the link carries {links[len(links) // 2]:.3g} Mbit/s"
                self.notes.append(f"adaptive compression from step {step} on: {chosen}; {link}")
            self._said, self._reviews = chosen, {}

    def state(self) -> Tensors:
        """See `Parallel.state`."""
        left = {f"{LEFT}.{name}": values for name, values in self._left.by_name.items()} if self._left else {}
        thin = {
            f"{THIN}.{name}": v for c in self.codecs.values() if isinstance(c, PowerSGD) for name, v in c.thin.items()
        }
        return {**left, **thin, STEPS: self._steps}

    def load_state(self, state: Tensors) -> None:
        """See `Parallel.load_state`. Without a state the residual is empty, which is reported in a note."""
        if STEPS not in state:
            what = "values not sent by earlier steps are lost" if self._left is not None else "its step count is 0"
            self.notes.append(
                f"gradient compression ({self.settings.name}) starts from scratch: {what}, because the checkpoint "
                "lacks its state for this number of workers"
            )
            return
        self._steps.copy_(state[STEPS])
        for full, values in state.items():
            kind, _, name = full.partition(".")
            if kind == LEFT and self._left is not None and name in self._left.by_name:
                self._left.by_name[name].copy_(values)
            for codec in self.codecs.values():
                if kind == THIN and isinstance(codec, PowerSGD) and values.shape[-1] == codec.rank:
                    codec.thin[name] = values.to(self.thread.device, copy=True)

    def close(self) -> None:
        """End the communication thread, and destroy its process group."""
        self.thread.close()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)
            self._own_group = None

    def _first_notes(self, named: dict[str, nn.Parameter]) -> list[str]:
        settings, notes = self.settings, []
        topk, powersgd = self.codecs.get("topk"), self.codecs.get("powersgd")
        if settings.name == "topk" and isinstance(topk, TopK) and settings.density * self.collectives.world_size >= 1:
            notes.append(
                f"compression.density {settings.density:g} saves nothing on {self.collectives.world_size} workers: "
                "each receives the values and indices of all others. "
                f"Use a density below 1/{self.collectives.world_size}"
            )
        if isinstance(powersgd, PowerSGD):
            parts = _layout(named, torch.float32).parts
            short = [part for part in parts if powersgd.shortens(part)]
            share = sum(part.size for part in short) / max(1, sum(part.size for part in parts))
            notes.append(
                f"powersgd of rank {settings.rank} approximates {len(short)} of {len(parts)} tensors, "
                f"{share:.0%} of the values; the others are sent whole"
            )
        return notes


class _LeftOver:
    """Values that this rank has not sent, by parameter, scaled like the next gradients.

    The tensors of a bucket are views of one tensor, which is created with the bucket and again when buckets change."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.by_name = {
            name: torch.zeros(p.numel(), dtype=computed_in(p.dtype), device=p.device) for name, p in named.items()
        }
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}
        self._last: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, names: tuple[str, ...]) -> torch.Tensor:
        """Residual of a bucket with these parameters, flat and by reference."""
        if names not in self._flat:
            self._flat = {others: flat for others, flat in self._flat.items() if not set(others) & set(names)}
            flat = torch.cat([self.by_name[name] for name in names])
            self._flat[names] = flat
            sizes = [self.by_name[name].numel() for name in names]
            self.by_name.update(zip(names, flat.split(sizes), strict=True))
        return self._flat[names]

    def remember(self, names: tuple[str, ...]) -> None:
        """Store a copy of a bucket's residual until `carry_over`."""
        self._last[names] = self._flat[names].clone()

    def carry_over(self, factor: Number, *, was_taken: Truth) -> None:
        """End the step: restore the residual if the step was skipped, and multiply it by `factor`."""
        if was_taken is not True:
            for names, last in self._last.items():
                flat = self._flat[names]
                flat.copy_(choose(was_taken, flat, last))
        self._last.clear()
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            for values in self.by_name.values():
                values.mul_(as_factor(factor, values.dtype))


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Type in which to compute for gradients of `dtype`; sums of residuals need more than 16 bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _layout(parameters: dict[str, Any], dtype: torch.dtype) -> Layout:
    parts, start = [], 0
    for name, parameter in parameters.items():
        # as it lies in memory, which is how DDP's bucket holds it
        outermost = max(range(parameter.dim()), key=parameter.stride, default=None) if parameter.dim() > 1 else None
        rows = parameter.shape[outermost] if outermost is not None and parameter.numel() else 1
        parts.append(Part(name, start, parameter.numel(), rows))
        start += parameter.numel()
    return Layout(tuple(parts), dtype.itemsize)
