"""Replicas of a model that train separately: their mean, and their distance from it.

Used by every strategy in which ranks have different values of the same parameters. Each replica has equal weight in a
mean, whatever its share of the samples. Frozen parameters never change and are not sent."""

import contextlib
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scaleray.common.equal_models import dense_buffers
from scaleray.common.metric_names import CONSENSUS_DISTANCE
from scaleray.profiling.collectives import ALL_REDUCE, BROADCAST
from scaleray.strategies.contract.later import Later
from scaleray.strategies.contract.parallel import Metrics, Parallel
from scaleray.strategies.contract.weight_shares import WeightShare, whole
from scaleray.strategies.sharding.shards import local, offset
from scaleray.strategies.sharding.unsharding import reshard
from scaleray.strategies.traffic.ledger import Ledger


class Replicas:
    """This rank's replica (or its part of one) and the corresponding replicas or parts on the ranks of `group`. Methods
    are collective over `group` unless noted. inner: the replica as trained by `whole`, a group of ranks; None if this
    rank trains it alone."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_mib: float,
        inner: Parallel | None = None,
        whole: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.group, self.size = model, group, dist.get_world_size(group)
        self.inner, self.whole = inner or Parallel(model, model), whole
        self.axis = "dp" if whole is None else "replicate"
        self._copies = self._count_copies()
        self.bucket_bytes = max(1, int(bucket_mib * 2**20))
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        self.sent = Ledger()
        """All traffic of this rank: the means formed here, and the strategy's own exchanges."""
        self.settle: Callable[[], float] = lambda: 1.0
        """Apply everything in flight to the replica, and return its weight in the mean, 1 on average. Its values are
        restored afterwards."""
        self._measured: Later | None = None  # squared distance of the replicas from their mean, and its squared norm

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Receive the optimizer of the trained parameters. Not collective."""
        self.optimizer = optimizer

    def moving(self) -> list[torch.Tensor]:
        """Changing tensors that have a mean: trained parameters and floating-point buffers. Not collective."""
        return [*self.trained, *(b for b in dense_buffers(self.model) if _has_mean(b))]

    def metrics(self) -> Metrics:
        """The consensus distance as last measured. Not collective."""
        measured = self._measured
        return {} if measured is None else {CONSENSUS_DISTANCE.name: lambda: _distance(measured)}

    def average(
        self,
        tensors: Sequence[torch.Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        with_momentum: bool = False,
        measures: bool = True,
    ) -> None:
        """Replace tensors (by default trained parameters and buffers) by their mean over `group` (by default all
        replicas). If it covers all replicas, the consensus distance is measured just before. with_momentum: average the
        optimizer's state too."""
        moving = self.moving() if tensors is None else tensors
        self._average(moving, group or self.group, measures=measures and group is None)
        if with_momentum:
            self._average_optimizer(group or self.group)

    @torch.no_grad()
    def begin_mean(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to average values of trained parameters over `group`, which has the same ranks as the replicas', while
        training continues. Returns a function that waits for the means of this rank's parts and measures the distance
        from them."""
        parts = [local(parameter.detach()) for parameter in parameters]
        copies = {id(part): self._copies[id(p)] for part, p in zip(parts, parameters, strict=True)}
        entry = self.sent.entry("exchanges", self.size, ALL_REDUCE)
        under_way = []
        for bucket in self._buckets(parts):
            own = self.flat(bucket)
            mean = own.clone()
            entry.add(mean)
            under_way.append((bucket, own, mean, dist.all_reduce(mean, group=group, async_op=True)))

        @torch.no_grad()
        def finish() -> list[torch.Tensor]:
            totals, found = torch.zeros(2, dtype=torch.float64, device=self._device), {}
            for bucket, own, mean, work in under_way:
                work.wait()
                sizes = [part.numel() for part in bucket]
                for part, old, new in zip(bucket, own.split(sizes), mean.div_(self.size).split(sizes), strict=True):
                    self._add_distance(totals, old, new, copies[id(part)])
                    found[id(part)] = new.view_as(part).to(part.dtype)
            self._measure(totals, group)
            return [found[id(part)] for part in parts]

        return finish

    def average_gradients(self) -> None:
        """Replace gradients by their mean. A gradient that only some replicas have counts as zero in the others."""
        has = torch.tensor([p.grad is not None for p in self.trained], dtype=torch.int8, device=self._device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self.group)
        used = [p for p, is_used in zip(self.trained, has.tolist(), strict=True) if is_used]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._average([p.grad for p in used if p.grad is not None], self.group)

    def share_buffers(self, which: Callable[[torch.Tensor], bool] = lambda buffer: True) -> None:
        """Give all replicas the buffers of the first one."""
        for buffer in filter(which, map(local, dense_buffers(self.model))):
            start = partial(dist.broadcast, buffer, group=self.group, group_src=0)
            self.sent.entry(self.axis, self.size, BROADCAST).run(start, buffer)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root mean square distance of the replicas from their mean, relative to its norm; changes nothing."""
        self._average(self.trained, self.group, measures=True, keeps=True)
        assert self._measured is not None
        return _distance(self._measured)

    @contextlib.contextmanager
    def averaged(self, with_optimizer: bool) -> Iterator[None]:
        """Context in which the model has the mean of the replicas and, if requested, the optimizer the mean of its
        state. Counters among the buffers are those of rank 0. Afterwards every value is restored bit-identically."""
        state = (
            [tensor for _, tensor in self._optimizer_tensors()] if with_optimizer else []
        )  # a copy doubles its memory
        tensors = [*self.trained, *dense_buffers(self.model), *state]
        kept = [tensor.detach().clone() for tensor in tensors]
        reshard(self.model)
        try:
            self._average(self.moving(), self.group, weight=self.settle())
            if with_optimizer:
                self._average_optimizer(self.group)
            self.share_buffers(lambda buffer: not _has_mean(buffer))
            yield
        finally:
            reshard(self.model)
            with torch.no_grad():
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)

    def parallel(self, *, model: nn.Module | None = None, **course: Any) -> Parallel:
        """`Parallel` for replicas that train separately. model: module that runs the user's code, if it is not the
        replica itself. course: further fields of `Parallel`, such as the synchronised steps. Not collective."""
        return dataclasses.replace(
            self.inner,
            model=model if model is not None else self.inner.model,
            weights=self.weights,
            share_of_square=None,
            use_optimizer=self.use_optimizer,
            replicas_differ=True,
            replica=dist.get_rank(self.group),
            local_group=self.whole,
            local_divisor=self.inner.gradient_divisor,
            averaged=self.averaged,
            metrics=self.metrics,
            arrivals=None,
            show_own_gradients=None,
            no_arrivals="replicas train separately and do not wait for each other in every step",
            **course,
        )

    def weights(self) -> WeightShare:
        """Mean of the replicas on the CPU: on rank 0 if it has a whole replica, otherwise divided among all ranks.
        Collective."""
        with self.averaged(False):
            if self.whole is not None:
                return self.inner.weights()
            return whole(self.model, keeps=dist.get_rank(self.group) == 0)

    @staticmethod
    def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies of tensors, concatenated (num_values,), in at least fp32. Not collective."""
        dtype = torch.float32
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])

    @staticmethod
    @torch.no_grad()
    def fill(tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Copy the values of a result of `flat` back into the tensors, in place. Not collective."""
        for tensor, value in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view_as(tensor))

    def _optimizer_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Optimizer state with one value per parameter value, under names that are the same on all ranks."""
        found = []
        for number, parameter in enumerate(self.trained):
            entries = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            for key in sorted(entries):
                value = entries[key]
                is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if is_like and _has_mean(value) and key != "step":  # a scalar parameter's step has its shape
                    found.append((f"{number}.{key} {tuple(value.shape)}", value))
        return found

    def _average_optimizer(self, group: dist.ProcessGroup) -> None:
        """Average the optimizer's state if all ranks have it in the same layout; a rank that has skipped every step has
        none."""
        tensors = self._optimizer_tensors()
        digest = hashlib.sha256("\n".join(name for name, _ in tensors).encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        extremes = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if int(extremes[0]) == -int(extremes[1]):
            self._average([tensor for _, tensor in tensors], group)

    @torch.no_grad()
    def _average(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        measures: bool = False,
        keeps: bool = False,
        weight: float = 1.0,
    ) -> None:
        parts = [local(tensor) for tensor in tensors]
        pairs = zip(parts, tensors, strict=True) if measures else ()
        copies = {id(part): self._copies[id(tensor)] for part, tensor in pairs if id(tensor) in self._copies}
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)  # distance and norm, squared
        size = dist.get_world_size(group)
        entry = self.sent.entry(self.axis if group is self.group else "node", size, ALL_REDUCE)
        for bucket in self._buckets(parts):
            # 16-bit values are summed in fp32: the mean of many replicas would lose most of its digits
            dtype = torch.promote_types(bucket[0].dtype, torch.float32)
            own = torch.cat([tensor.reshape(-1).to(dtype) for tensor in bucket])
            mean = own.clone() if measures else own
            if weight != 1.0:
                mean.mul_(weight)
            entry.run(partial(dist.all_reduce, mean, group=group), mean)
            mean.div_(size)
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, new, old in zip(bucket, mean.split(sizes), own.split(sizes), strict=True):
                if id(tensor) in copies:
                    self._add_distance(totals, old, new, copies[id(tensor)])
                if not keeps:
                    tensor.copy_(new.view_as(tensor))
        if measures:
            self._measure(totals, group)

    @staticmethod
    def _add_distance(totals: torch.Tensor, own: torch.Tensor, mean: torch.Tensor, copies: int) -> None:
        """Add a tensor's squared distance and squared norm to `totals`. copies: number of ranks of a replica that add
        it."""
        totals[0] += (own - mean).abs().double().square().sum() / copies
        totals[1] += mean.abs().double().square().sum() / copies

    def _measure(self, totals: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(totals, group=group)  # all ranks add the same norm: its sum is `size` times as large
        if self.whole is not None:
            dist.all_reduce(totals, group=self.whole)
        self._measured = Later(totals)

    @property
    def _device(self) -> torch.device:
        return self.trained[0].device

    def _count_copies(self) -> dict[int, int]:
        """Number of ranks of a replica that have the same part of each trained parameter, by the parameter's id.
        Collective over these ranks."""
        mine = {id(p): (name, offset(p)) for name, p in self.model.named_parameters() if p.requires_grad}
        if self.whole is None:
            return dict.fromkeys(mine, 1)
        everyone: list[Any] = [None] * dist.get_world_size(self.whole)
        dist.all_gather_object(everyone, list(mine.values()), group=self.whole)
        counts = Counter(part for theirs in everyone for part in theirs)
        return {key: counts[part] for key, part in mine.items()}

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Lists of tensors of one type, each filling a bucket except the last of a type; same order on all ranks."""
        open_ones: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            bucket = open_ones.setdefault(tensor.dtype, [])
            bucket.append(tensor)
            if sum(t.numel() * t.element_size() for t in bucket) >= self.bucket_bytes:
                yield open_ones.pop(tensor.dtype)
        yield from open_ones.values()


def _distance(measured: Later) -> float:
    apart, norm = measured.read()
    return math.sqrt(apart / norm) if norm else 0.0


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
