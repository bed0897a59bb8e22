"""Find the largest micro-batch that fits, using training steps under the real strategy that are then undone.

Peak memory grows almost linearly with the micro-batch, so two small trials determine the next size. So memory rarely
runs out, which is important because ranks in the middle of a collective could not agree on it. All ranks try the result
together."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe, with_micro_size
from scaleray.data import RankBatch
from scaleray.data.source_interface import rows_in
from scaleray.errors import ConfigError
from scaleray.records.phases import Phase
from scaleray.records.text.units import GIB
from scaleray.training.health.live_memory import LiveTensors, free_unused, is_out_of_memory, local_part, storage_bytes
from scaleray.training.health.memory_report import gradients, lasting
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.micro_batches import micro_batches, user_batch
from scaleray.training.step.step import TrainStep
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.unchanged import unchanged_buffers

NUM_STEPS = 2  # the second begins with the optimizer's state


@dataclass(frozen=True)
class Trial:
    """One size, on the worker that needed the most memory. peak_bytes: infinite if memory ran out."""

    micro_batch_size: int
    fits: bool
    peak_bytes: float


@dataclass(frozen=True)
class Found:
    """The largest size that fits, and the trials.

    limit_bytes: limit of the worker with the least memory, including the reserve."""

    micro_batch_size: int
    trials: tuple[Trial, ...]
    limit_bytes: float
    largest: int

    @property
    def headroom_share(self) -> float:
        """Share of the limit that is left free on the worker that uses the most memory."""
        peak = next(t.peak_bytes for t in self.trials if t.micro_batch_size == self.micro_batch_size)
        return 1.0 - peak / self.limit_bytes

    def values(self) -> dict[str, Any]:
        """Values for the run's record."""
        return {**asdict(self), "headroom_share": self.headroom_share}

    def __str__(self) -> str:
        tried = ", ".join(f"{t.micro_batch_size} {'fits' if t.fits else 'does not'}" for t in self.trials)
        return (
            f"micro-batches of {self.micro_batch_size} rows, of at most {self.largest}: {tried}; "
            f"{self.headroom_share:.0%} of {self.limit_bytes / GIB:.3g} GiB stays free"
        )


def find(
    workload: Any,
    setup: Setup,
    config: RunConfig,
    recipe: Recipe,
    place: RankContext,
    batch: RankBatch,
    *,
    gives_tuples: bool,
    enter: Callable[[Phase], object] = lambda phase: None,
) -> Found:
    """Search among the divisors of a worker's share, up to the recipe's micro-batch. Collective, with the same result
    on all ranks.

    batch: rows for trial batches. Weights, optimizer state, buffers, gradients and random numbers are restored. Raises
    ConfigError if not even the smallest size fits."""
    search = _Search(workload, setup, config, recipe, place, batch, gives_tuples, enter)
    largest = recipe.micro_batch_size
    sizes = [d for d in range(1, largest + 1) if recipe.per_worker_batch_size % d == 0]
    trials: list[Trial] = []
    with same_random_numbers(place.device), _unchanged(workload, setup):
        while (size := next_size(sizes, trials, search.limit, may_fail=search.may_fail)) is not None:
            trials.append(search.trial(size))
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)  # else the run's peak would be that of a size it does not use
    fitting = [t.micro_batch_size for t in trials if t.fits]
    if not fitting:
        least = min(trials, key=lambda t: t.micro_batch_size)
        raise ConfigError(
            "memory.limit_gib",
            round(search.full_limit / GIB, 6),
            f"a micro-batch of {least.micro_batch_size} needs {least.peak_bytes / GIB:.3g} GiB, "
            "and memory.reserve must stay free",
            "use activations.checkpointing full, which saves most, or a strategy that shards the model's weights",
        )
    return Found(max(fitting), tuple(trials), search.full_limit, largest)


def next_size(sizes: list[int], trials: list[Trial], limit: float, *, may_fail: bool = True) -> int | None:
    """Next size to try: first the two smallest, then the largest that fits according to a line through the last two
    trials. sizes: ascending. may_fail: try the next size even if the line predicts that it does not fit, to be certain;
    small sizes bend the line, as the optimizer's step may need more memory than they do. None when the search is over.
    """
    most = min((t.micro_batch_size for t in trials if not t.fits), default=math.inf)
    fitting = sorted((t for t in trials if t.fits), key=lambda t: t.micro_batch_size)
    least = fitting[-1].micro_batch_size if fitting else 0
    left = [size for size in sizes if least < size < most]
    if not left:
        return None
    if len(fitting) < 2:
        return left[0]
    before, last = fitting[-2:]
    slope = max(0.0, (last.peak_bytes - before.peak_bytes) / (last.micro_batch_size - before.micro_batch_size))
    reachable = [s for s in left if last.peak_bytes + slope * (s - last.micro_batch_size) <= limit]
    return reachable[-1] if reachable else left[0] if may_fail else None


class _Search:
    def __init__(
        self,
        workload: Any,
        setup: Setup,
        config: RunConfig,
        recipe: Recipe,
        place: RankContext,
        batch: RankBatch,
        gives_tuples: bool,
        enter: Callable[[Phase], object],
    ) -> None:
        self.workload, self.setup, self.config, self.recipe, self.place = workload, setup, config, recipe, place
        self.batch, self.gives_tuples, self.enter = batch, gives_tuples, enter
        self.full_limit = -self._largest(-_limit_bytes(config, place.device))
        self.limit = self.full_limit * (1.0 - config.memory.reserve)
        # on the CPU the limit is only counted; elsewhere a rank that runs out in a collective takes all others with it
        self.may_fail = place.device.type == "cpu" or place.world_size == 1 or self._is_alone_possible()

    def trial(self, size: int) -> Trial:
        """Train two steps with micro-batches of this size. Collective."""
        free_unused(self.place.device)
        rows = size * min(2, self.recipe.per_worker_batch_size // size)  # a second one meets the first one's gradients
        # alone first where that is possible: a rank that runs out of memory then leaves no other one waiting
        if self._is_alone_possible() and self._largest(float(self._runs_out_alone(size, rows))):
            return Trial(size, False, math.inf)
        peak = math.inf
        try:
            peak = self._peak_bytes(lambda: self._train(size, rows))
        except Exception as exc:
            if not is_out_of_memory(exc) or self.place.world_size > 1:
                raise
        peak = self._largest(peak + self._bytes_of_other_rows(rows))
        return Trial(size, peak <= self.limit, peak)

    def _is_alone_possible(self) -> bool:
        parallel = self.setup.parallel
        return self.place.world_size > 1 and not parallel.forward_is_collective and parallel.run_micro_batches is None

    def _runs_out_alone(self, size: int, rows: int) -> bool:
        """Forward and backward passes through the model inside the strategy, without communication."""
        try:
            for columns, _ in micro_batches(self._rows(rows), size):
                self.enter(Phase.FORWARD)
                dtype, tuples = self.setup.precision.input_dtype, self.gives_tuples
                batch = user_batch(self.workload, columns, self.place.device, dtype, gives_tuples=tuples)
                with self.setup.precision.autocast():
                    result = self.workload.loss(self.setup.parallel.module, batch)
                check_sum_and_count(result, what="loss()")[0].backward()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            return True
        finally:
            self.setup.optimizer.zero_grad(set_to_none=True)
        return False

    def _train(self, size: int, rows: int) -> None:
        recipe = with_micro_size(self.recipe, size, why="a trial")
        config = self.config.changed({"memory.on_out_of_memory": "raise"})
        step = TrainStep(
            self.workload, self.setup, config, recipe, self.place, gives_tuples=self.gives_tuples, enter=self.enter
        )
        for _ in range(NUM_STEPS):
            step(self._rows(rows), num_rows=rows * self.place.data_parallel_size, want_norm=True)

    def _peak_bytes(self, run: Callable[[], None]) -> float:
        device = self.place.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            run()
            return float(torch.cuda.max_memory_reserved(device))
        there = sum(lasting(self.setup).values())
        with LiveTensors() as live:
            run()
        # gradients may lie in memory that was there before, such as DDP's buckets
        return float(there + live.counted().peak + storage_bytes(g for g in gradients(self.setup) if not live.knows(g)))

    def _rows(self, num: int) -> RankBatch:
        """Trial batch made of this many copies of real rows."""
        index = np.arange(num) % rows_in(self.batch.columns)
        return RankBatch(self.batch.step, {n: v[index] for n, v in self.batch.columns.items()}, num)

    def _bytes_of_other_rows(self, rows: int) -> float:
        """Bytes of the rows that a trial lacks: a step has its whole share on the device, a trial only some rows."""
        there = rows_in(self.batch.columns)
        row_bytes = sum(v.nbytes for v in self.batch.columns.values()) / there
        return row_bytes * max(0, self.recipe.per_worker_batch_size - rows)

    def _largest(self, value: float) -> float:
        """Maximum over all ranks, returned on every rank. Collective."""
        if self.place.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.place.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)


def _limit_bytes(config: RunConfig, device: torch.device) -> float:
    """Memory that this worker may use: the config's limit, but on a GPU no more than exists."""
    limit = config.memory.limit_gib * GIB if config.memory.limit_gib is not None else math.inf
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limit = min(limit, free + torch.cuda.memory_reserved(device))
    return float(limit)


@contextlib.contextmanager
def _unchanged(workload: Any, setup: Setup) -> Iterator[None]:
    """Context that restores the state of the training on exit.

    The copies are in host memory."""
    module, optimizer, scaler, parallel = setup.parallel.module, setup.optimizer, setup.precision.scaler, setup.parallel
    state = {p: dict(entries) for p, entries in optimizer.state.items()}
    tensors = [
        *setup.parameters,  # not the module's, which FSDP replaces for a time
        *(v for entries in state.values() for v in entries.values() if isinstance(v, torch.Tensor)),
    ]
    values = [(part, part.detach().to("cpu", copy=True)) for part in map(local_part, tensors)]
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    scaling = scaler.state_dict()
    own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parallel.state().items()}
    try:
        with unchanged_buffers(workload, module):
            yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value.to(tensor.device))
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)
        if scaler.is_enabled():
            scaler.load_state_dict(scaling)
        if own:
            parallel.load_state(own)
