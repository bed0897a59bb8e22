"""Times at which each bucket of DDP is full, at its last gradient, and at which all buckets are.

A communication hook in Python would observe this too, but at ten times the cost: DDP would pass it every bucket instead
of reducing it in C++, and the hook could wait for the interpreter while a thread reads rows. A hook on one parameter
per bucket does not affect DDP. A hook on the loss would observe only the end of a pass, and would cost as much as six.
"""

import itertools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from scaleray.profiling.collectives import layer_range
from scaleray.records.phases import Enter, Phase
from scaleray.records.profile_record import Places
from scaleray.strategies.contract.arrivals import Moments, drawn_together

STEPS_BEFORE = 2
"""Steps after which DDP keeps the layout of its buckets, which it rebuilds at the beginning of the second step."""
LEAST_PLACES = 6
"""Minimum number of points watched in a pass, if there are enough parameters."""


class BucketArrivals:
    """Arrivals at the all-reduce of each bucket of a wrapped model, in the order in which DDP reduces the buckets."""

    def __init__(self, wrapped: DistributedDataParallel, model: nn.Module) -> None:
        self._wrapped = wrapped
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameters = [p for p in wrapped._module_parameters if p.requires_grad]  # as DDP numbers them
        self._names = [names[id(p)] for p in self._parameters]
        self._hooks: list[RemovableHandle] = []
        self._order: list[int] = []
        self._steps = 0
        self._enter: Enter | None = None
        self._pass = -1  # torch's number of the backward pass that runs, or has run

    def tell_phases(self, enter: Enter) -> None:
        """See `Parallel.tell_phases`. The time after the last gradient of a step is exposed communication."""
        self._enter = enter
        if not self._hooks:  # until the places are known, the one that should come first speaks for all
            last = len(self._parameters) - 1
            self._hook([last], lambda number: lambda parameter: self._begin(_current_graph_task_id()))

    def settle(self, moments: Moments) -> Places | None:
        """See `ArrivalSource`. One step records the order of all gradients, later ones the last gradient of each part
        of a bucket."""
        self._steps += 1
        if self._steps == STEPS_BEFORE:
            self.close()
            self._hook(range(len(self._parameters)), self._seeing)
        if self._steps <= STEPS_BEFORE:
            return None
        self.close()
        came = {number: place for place, number in enumerate(self._order)}
        runs = drawn_together(len(found := self._buckets()))
        buckets = [[number for place in run for number in found[place]] for run in runs]
        parts = [(number, part) for number, bucket in enumerate(buckets) for part in _parts(bucket, len(buckets))]
        # what comes last is this rank's own business, the places are the same on all
        last = [max((n for n in part if n in came), key=lambda n: came[n], default=None) for _, part in parts]
        place_of = {number: place for place, number in enumerate(last) if number is not None}
        now, stamp = moments.now, moments.stamp

        def noting(number: int) -> Callable[[torch.Tensor], None]:
            place = place_of[number]

            def note(parameter: torch.Tensor) -> None:
                now[place] = stamp()
                if (running := _current_graph_task_id()) != self._pass:
                    self._begin(running)

            return note

        self._hook(place_of, noting)
        return Places(
            forward=(),
            backward=tuple(self._layers(part) for _, part in parts),
            buckets=tuple(number for number, _ in parts),
            bucket_layers=tuple(map(self._layers, buckets)),
            meets_once=True,
        )

    def close(self) -> None:
        """See `ArrivalSource`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _layers(self, numbers: Iterable[int]) -> str:
        return layer_range(self._names[number] for number in sorted(numbers))

    def _hook(self, numbers: Iterable[int], hook_of: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        self._hooks = [self._parameters[n].register_post_accumulate_grad_hook(hook_of(n)) for n in numbers]

    def _seeing(self, number: int) -> Callable[[torch.Tensor], None]:
        def see(parameter: torch.Tensor) -> None:
            self._order.append(number)
            if (running := _current_graph_task_id()) != self._pass:
                self._begin(running)

        return see

    def _begin(self, running: int) -> None:
        """Report the end of this backward pass at its first gradient: before DDP's own callback, which waits."""
        self._pass = running
        if self._enter is not None and self._wrapped.require_backward_grad_sync:
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        # a pass within another one is a checkpoint that is computed again: the whole goes on
        if self._enter is not None and _current_autograd_node() is None:
            self._enter(Phase.COMMUNICATION)

    def _buckets(self) -> list[list[int]]:
        """Numbers of the parameters in each bucket, both in the order in which gradients arrive."""
        data = self._wrapped._get_ddp_logging_data()
        if data.get("has_rebuilt_buckets") and data.get("rebuilt_per_bucket_param_indices"):
            text = str(data["rebuilt_per_bucket_param_indices"])
            return [[int(number) for number in bucket.split()] for bucket in text.split(",")]
        limits, _ = self._wrapped._bucket_config.compute_bucket_size_limits(
            static_graph=self._wrapped.static_graph, find_unused_parameters=self._wrapped.find_unused_parameters
        )
        found, _ = dist._compute_bucket_assignment_by_size(self._parameters, limits)
        return [list(reversed(bucket)) for bucket in reversed(found)]


def _parts(bucket: list[int], num_buckets: int) -> list[list[int]]:
    """Watched parts of a bucket, since a few whole buckets would show little about the layers."""
    count = max(1, min(len(bucket), LEAST_PLACES // num_buckets))
    edges = [len(bucket) * part // count for part in range(count + 1)]
    return [bucket[begin:end] for begin, end in itertools.pairwise(edges)]
