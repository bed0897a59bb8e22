"""Smaller micro-batches when memory runs out: all ranks repeat the step with micro-batches of half the size.

This is possible while no gradient of the step has been communicated: before the last backward pass or, on one worker,
at any time before the end of the step."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from scaleray.common.equal_models import dense_buffers
from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe, largest_divisor, with_micro_size
from scaleray.errors import first_line
from scaleray.training.health.live_memory import free_unused, is_out_of_memory
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext


class MemoryRanOut(Exception):
    """Memory ran out on some rank before anything was communicated. Raised on all ranks."""


class OutOfMemory(MemoryError):
    """Memory ran out, and micro-batches cannot be made smaller."""


class BackOff:
    """State needed to repeat a step. Without `memory.on_out_of_memory: halve` it does nothing."""

    def __init__(self, config: RunConfig, setup: Setup, place: RankContext) -> None:
        self.setup, self.place = setup, place
        self.is_on = config.memory.on_out_of_memory == "halve"

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's buffers with their current values, stored before a step that may be repeated."""
        return [(b, b.clone()) for b in dense_buffers(self.setup.parallel.module)] if self.is_on else []

    def caught(self, *, here: bool = True) -> contextlib.AbstractContextManager[list[str]]:
        """Catch an out-of-memory error if the step can be repeated; the list then contains its text."""
        return self._catching() if self.is_on and here else contextlib.nullcontext([])

    @contextlib.contextmanager
    def _catching(self) -> Iterator[list[str]]:
        shortage: list[str] = []
        try:
            yield shortage
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            # the text, as the error itself would hold the activations
            shortage.append(first_line(exc))

    def agree_on(self, shortage: list[str]) -> None:
        """Raise MemoryRanOut on all ranks if memory ran out on any of them. So far no gradient has been communicated.

        Collective."""
        if not self.is_on:
            return
        is_short = torch.tensor(float(bool(shortage)), device=self.place.device)
        if self.place.world_size > 1:
            dist.all_reduce(is_short, op=dist.ReduceOp.MAX)
        if is_short:
            raise MemoryRanOut(shortage[0] if shortage else "on another worker")

    def halved(self, recipe: Recipe, why: str, buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> Recipe:
        """Recipe with micro-batches of half the size. All else is restored to its state before the failed step."""
        size = recipe.micro_batch_size
        smaller = largest_divisor(recipe.per_worker_batch_size, at_most=size // 2)
        if smaller is None:
            raise OutOfMemory(f"a micro-batch of one row does not fit: {why}")
        assert self.setup.parallel.abandon is not None
        self.setup.parallel.abandon()
        self.setup.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        free_unused(self.place.device)
        return with_micro_size(recipe, smaller, why=f"halved from {size}, which ran out of memory")
