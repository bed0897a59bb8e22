"""Loss over all rows of a global batch, across workers and micro-batches: `outputs()` and `batch_loss()`.

The outputs of all rows are gathered, and every worker computes their loss and its gradient with respect to them. The
loss of each micro-batch is then `sum(outputs * gradient)`, whose gradient with respect to the parameters is the
micro-batch's part of the whole gradient. With several micro-batches per worker, the forward passes run without
gradients first and then again with them (gradient caching: Gao et al., 2021, arXiv:2101.06983)."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from scaleray.common.seeding import random_state, same_random_numbers, set_random_state, stream_seed
from scaleray.errors import WorkloadError
from scaleray.records.text.units import memory
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.workload import Outputs, outputs_go_to

WIDE = (torch.float32, torch.float64)


def gathered_rows(outputs: Mapping[str, torch.Tensor], place: RankContext) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The rows of all workers in the order of the global batch, and the size of each share. Collective.

    Raises WorkloadError on all workers if the types or shapes of their tensors differ."""
    own = {name: outputs[name].contiguous() for name in sorted(outputs)}
    rows = next(iter(own.values())).shape[0]
    if place.world_size == 1:
        return own, [rows]
    kinds = {name: f"{tensor.dtype} {list(tensor.shape[1:])}" for name, tensor in own.items()}
    mine = torch.tensor([rows, zlib.crc32(repr(kinds).encode())], device=place.device)
    heads = [torch.empty_like(mine) for _ in range(place.world_size)]
    dist.all_gather(heads, mine)
    sizes, sums = zip(*(head.tolist() for head in heads), strict=True)
    if len(set(sums)) > 1:
        everyone = place.gathered(kinds)
        other = next(each for each in everyone if each != everyone[0])
        raise _unequal("workers", everyone[0], other)
    found, shares = {}, [ranks[0] for ranks in place.mesh.replicas]  # workers of a replica have the same rows
    for name, tensor in own.items():
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[:rows] = tensor
        parts = [torch.empty_like(padded) for _ in range(place.world_size)]
        dist.all_gather(parts, padded)
        found[name] = torch.cat([parts[rank][: sizes[rank]] for rank in shares])
    return found, [sizes[rank] for rank in shares]


class WholeBatchLoss:
    """Loss of a step of a workload with `batch_loss`, computed as a loss of each micro-batch in turn.

    at_once: whether every worker has one micro-batch, whose forward pass may wait for those of the others."""

    def __init__(self, workload: Any, place: RankContext, seed: int) -> None:
        self.workload, self.place, self.seed = workload, place, seed
        self.at_once = True
        self.bytes_gathered = 0
        self._states: list[dict[str, torch.Tensor]] = []

    def begin(self, step: int, *, at_once: bool) -> None:
        """Begin a step."""
        self.at_once, self._step = at_once, step
        self._parts: list[dict[str, torch.Tensor]] = []
        self._position = 0
        self._gradients: dict[str, torch.Tensor] | None = None
        self._value: tuple[torch.Tensor, Any] | None = None
        self._states = []

    @contextlib.contextmanager
    def first_pass(self, batch: Any, weight: int) -> Iterator[None]:
        """Context of a micro-batch's first forward pass. weight: number of its rows that count, 0 for a placeholder.
        Raises WorkloadError if the batch is changed in place."""
        self._counts = weight > 0
        self._states.append(random_state(self.place.device))
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        with torch.no_grad(), outputs_go_to(self._collect):
            yield
        if [tensor._version for tensor in tensors] != before:
            text = "changes its batch in place: with several micro-batches it receives each batch twice"
            raise WorkloadError.problem("outputs()", text, "work on a copy of the tensor")

    @contextlib.contextmanager
    def second_pass(self, weight: int) -> Iterator[None]:
        """Context of a micro-batch's forward pass with gradients, with the random numbers of the first."""
        self._counts = weight > 0
        if self._states:
            set_random_state(self._states.pop(0), self.place.device)
        with outputs_go_to(self._at_once if self.at_once else self._replay):
            yield

    def compute(self, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Compute the loss over the outputs of all workers, and its gradient. Collective."""
        everyone, sizes = gathered_rows(joined(self._parts), self.place)
        self.bytes_gathered = sum(tensor.nbytes for tensor in everyone.values())
        start = sum(sizes[: self.place.data_rank])
        leaves = {name: wide(tensor).detach() for name, tensor in everyone.items()}
        inputs = [tensor.requires_grad_() for tensor in leaves.values() if tensor.is_floating_point()]
        with torch.enable_grad(), autocast():
            total, count = self._loss_of(leaves)
            if not total.requires_grad:
                raise WorkloadError(
                    "batch_loss()",
                    "a constant",
                    "it must depend on the outputs and have a gradient",
                    "do not detach them",
                )
            gradients = iter(torch.autograd.grad(total, inputs, allow_unused=True))
        self._gradients = {}
        for name, tensor in leaves.items():
            gradient = next(gradients) if tensor.is_floating_point() else None
            if gradient is not None:
                self._gradients[name] = gradient[start : start + sizes[self.place.data_rank]]
        counts = self.place.data_rank == next(rank for rank, size in enumerate(sizes) if size)
        zero = torch.zeros_like(total.detach())
        self._value = (total.detach(), count) if counts else (zero, 0)

    def _loss_of(self, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """The loss, computed with the same random numbers on all workers."""
        with same_random_numbers(self.place.device):
            torch.manual_seed(stream_seed(self.seed, "batch_loss", self._step))
            return check_sum_and_count(self.workload.batch_loss(leaves), what="batch_loss()")

    def _collect(self, outputs: Outputs) -> tuple[torch.Tensor, int]:
        found = {name: tensor.detach() for name, tensor in outputs.items()}
        self._parts.append(found if self._counts else {name: tensor[:0] for name, tensor in found.items()})
        return torch.zeros((), device=self.place.device), 0

    def _at_once(self, outputs: Outputs) -> tuple[torch.Tensor, Any]:
        self._collect(outputs)
        self.compute(contextlib.nullcontext)  # in the forward pass, which is under autocast already
        return self._replay(outputs)

    def _replay(self, outputs: Outputs) -> tuple[torch.Tensor, Any]:
        """Loss of a micro-batch whose gradient is its part of the whole batch's. The first one also has the value."""
        assert self._gradients is not None and self._value is not None
        value, count = self._value
        if not self._counts:  # a placeholder, which has no part in it
            nothing = sum((wide(outputs[n]).sum() for n in self._gradients if outputs[n].requires_grad), value * 0.0)
            return nothing * 0.0, 0
        rows = next(iter(outputs.values())).shape[0]
        part = slice(self._position, self._position + rows)
        self._position += rows
        self._value = torch.zeros_like(value), 0
        for name, gradient in self._gradients.items():
            if outputs[name].requires_grad:
                moving = (wide(outputs[name]) * gradient[part]).sum()
                value = value + (moving - moving.detach()).to(value.dtype)
        return value, count

    def note(self, num_micro_batches: int) -> str:
        """Describe the cost of the loss over the whole batch to the user."""
        text = f"batch_loss() over the whole batch: {memory(self.bytes_gathered)} of outputs on each worker"
        if not self.at_once:
            text += f"; with {num_micro_batches} micro-batches a step each forward pass is computed twice"
        return text


class EvaluatedBatchLoss:
    """Loss of an evaluated split, over groups of as many rows as a global batch has. The last group may be smaller."""

    def __init__(self, workload: Any, place: RankContext, size: int) -> None:
        self.workload, self.place, self.size = workload, place, size
        self._rows: dict[str, torch.Tensor] = {}

    def of_batch(self, num_rows: int) -> Callable[[Outputs], tuple[torch.Tensor, torch.Tensor]]:
        """Loss of the groups of rows that a batch completes. num_rows: rows of this worker in it, 0 for a placeholder.
        Collective."""

        def take(outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
            own = {name: tensor.detach()[:num_rows] for name, tensor in outputs.items()}
            everyone, _ = gathered_rows(own, self.place)
            self._rows = joined([self._rows, everyone] if self._rows else [everyone])
            found = torch.zeros(2, dtype=torch.float64, device=self.place.device)
            while next(iter(self._rows.values())).shape[0] >= self.size:
                found += self._loss_of({name: tensor[: self.size] for name, tensor in self._rows.items()})
                self._rows = {name: tensor[self.size :] for name, tensor in self._rows.items()}
            return found[0], found[1]

        return take

    def rest(self) -> torch.Tensor:
        """Loss and count of the last, incomplete group; zeros if there is none."""
        rows, self._rows = self._rows, {}
        if not rows or not next(iter(rows.values())).shape[0]:
            return torch.zeros(2, dtype=torch.float64, device=self.place.device)
        return self._loss_of(rows)

    def _loss_of(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss and count, returned on the first share only, since they are the same on all workers."""
        given = self.workload.batch_loss({name: wide(tensor) for name, tensor in rows.items()})
        total, count = check_sum_and_count(given, what="batch_loss()")
        found = torch.tensor([0.0, float(count)], dtype=torch.float64, device=self.place.device)
        found[0] = total.detach()
        return found * float(self.place.data_rank == 0)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the rows of several micro-batches. Raises WorkloadError if their shapes differ."""
    kinds = [{n: f"{t.dtype} {list(t.shape[1:])}" for n, t in part.items()} for part in parts]
    other = next((each for each in kinds if each != kinds[0]), None)
    if other is not None:
        raise _unequal("micro-batches", kinds[0], other)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, converted to float32 if it has fewer digits, for sums over many rows."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in WIDE else tensor


def _unequal(of: str, one: Mapping[str, str], other: Mapping[str, str]) -> WorkloadError:
    name = min(n for n in {*one, *other} if one.get(n) != other.get(n))
    return WorkloadError(
        f"outputs()[{name!r}]", f"{one.get(name, 'missing')} and {other.get(name, 'missing')}",
        f"tensors of all {of} must be equal in everything but the number of rows", "pad them to one size",
    )  # fmt: skip
