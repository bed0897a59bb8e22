"""Samples of each step: a pure function of (seed, epoch, step), independent of the number of workers.

A worker's part is a contiguous slice of the global batch. Any world size that divides it, or workers with unequal
parts, therefore see the same samples in the same order. Nothing is stored: the position of any sample is computed, so
starting in the middle of an epoch is as cheap as at its beginning."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scaleray.config.recipe.shares import share_of
from scaleray.data.rank_batch import TokenCuts

ROUNDS = 6  # rounds of the Feistel network; with 4 and more, neighbouring positions show no correlation


@dataclass(frozen=True)
class Permutation:
    """Pseudo-random order of range(size) that can be evaluated anywhere without being stored.

    An additive Feistel network over the grid a x b >= size (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"), applied repeatedly to positions outside the range until they are inside."""

    size: int
    key: int

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Elements at `positions` (n,), int64 in and out."""
        if self.size <= 1:
            return np.zeros_like(positions)
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        rows = math.isqrt(self.size - 1) + 1
        a, b = np.uint64(rows), np.uint64(-(-self.size // rows))
        left: np.ndarray = values // b
        right: np.ndarray = values - left * b
        for number in range(ROUNDS):
            key = np.uint64((self.key + number * 0x9E3779B97F4A7C15) % 2**64)
            if number % 2:
                right = _remainder(right + _remainder(mixed(left ^ key), b), b)
            else:
                left = _remainder(left + _remainder(mixed(right ^ key), a), a)
        return left * b + right


def mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _remainder(values: np.ndarray, divisor: np.uint64) -> np.ndarray:
    """values % divisor. numpy has vector instructions for division by one number, but not for the remainder."""
    result: np.ndarray = values - values // divisor * divisor
    return result


def stream_key(seed: int, *names: object) -> int:
    """64-bit key for one named use of the seed; different names give independent streams."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Origin:
    """Starting point of a plan that continues another plan with a different batch size.

    step: number of its first step. epoch, sample: the training's position at that step, within the epoch."""

    step: int
    epoch: int
    sample: int


@dataclass(frozen=True)
class StepPlan:
    """Order of the samples of one split.

    group_sizes: number of rows of each group that is read as one piece (a Parquet row group), or None if any row can be
    read alone. Groups are permuted, and rows are shuffled within windows of `window_rows`."""

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    group_sizes: tuple[int, ...] | None = None
    window_rows: int = 100_000
    is_streamed: bool = False
    """Whether the rows come from a stream with its own order, so that the plan only counts them."""
    given_order: str = ""
    """Guarantee about the order if rows can only be iterated: the source decides their order, the plan the size of a
    step."""
    is_dealt: bool = False
    """Whether each worker iterates rows of its own, all workers equally many."""
    name: str = field(default="train")
    origin: Origin | None = None
    """Position from which this plan applies if the batch size was different before; None for the first step."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch, including a partial last one unless it is dropped."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def promise(self) -> str:
        """Guarantee about the order of samples, as text."""
        if self.is_streamed:
            return (
                "weak: a Ray Dataset is streamed, so the order of the samples depends on the number of workers; random "
                "numbers drawn by its own functions are not seeded, those of transform(rows, rng) follow from seed, "
                "epoch and the values of the row"
            )
        if self.given_order:
            return self.given_order
        if not self.shuffle:
            return "exact: file order, the same for every number of workers"
        if self.group_sizes is None:
            return "exact: a global permutation each epoch, the same for every number of workers"
        return (
            f"exact: row groups in random order, rows shuffled in windows of about {self.window_rows}, "
            "the same for every number of workers"
        )

    def num_rows(self, step: int) -> int:
        """Number of samples in the global batch of this step (from 0, counted over epochs)."""
        _, start = self.place(step)
        return min(self.global_batch_size, self.num_samples - start)

    def place(self, step: int) -> tuple[int, int]:
        """Epoch of this step, and number of samples in that epoch before it."""
        if self.origin is None:
            epoch, in_epoch = divmod(step, self.steps_per_epoch)
            return epoch, in_epoch * self.global_batch_size
        number = step - self.origin.step
        if number < self.steps_to_epoch_end:
            return self.origin.epoch, self.origin.sample + number * self.global_batch_size
        epoch, in_epoch = divmod(number - self.steps_to_epoch_end, self.steps_per_epoch)
        return self.origin.epoch + 1 + epoch, in_epoch * self.global_batch_size

    @property
    def steps_to_epoch_end(self) -> int:
        """Number of steps of this plan in the epoch in which it begins."""
        rest = self.num_samples - (self.origin.sample if self.origin else 0)
        return rest // self.global_batch_size if self.drop_last else -(-rest // self.global_batch_size)

    def epochs(self, steps: int) -> float:
        """Number of passes over the data after this many steps, as a fraction."""
        if self.origin is None:
            return steps / self.steps_per_epoch
        epoch, start = self.place(steps)
        return epoch + start / self.num_samples

    def global_indices(self, step: int) -> np.ndarray:
        """Sample indices of the global batch of this step, int64 (num_rows,)."""
        return self.samples_at(self.positions(step))

    def rank_slice(self, step: int, rank: int, world_size: int, shares: Sequence[int] | None = None) -> slice:
        """This rank's slice of the global batch. In a partial batch, the first ranks may have one more sample.

        shares: samples of a full batch by rank, if unequal; a partial batch is cut in proportion."""
        if shares is not None:
            return share_of(shares, rank, num_rows=self.num_rows(step))
        share, rest = divmod(self.num_rows(step), world_size)
        start = rank * share + min(rank, rest)
        return slice(start, start + share + (1 if rank < rest else 0))

    def rank_indices(self, step: int, rank: int, world_size: int, shares: Sequence[int] | None = None) -> np.ndarray:
        """Sample indices of this rank's part, in order."""
        return self.samples_at(self.positions(step, rank, world_size, shares))

    def positions(
        self, step: int, rank: int = 0, world_size: int = 1, shares: Sequence[int] | None = None
    ) -> np.ndarray:
        """Positions of this rank's part in the endless sequence of all epochs, int64: epoch * num_samples + place."""
        epoch, before = self.place(step)
        part = self.rank_slice(step, rank, world_size, shares)
        start = epoch * self.num_samples + before
        return np.arange(start + part.start, start + part.stop, dtype=np.int64)

    def token_cuts(self, step: int, rank: int, world_size: int) -> TokenCuts | None:
        """A rank's micro-batches of a step, if counted in tokens; None if counted in rows."""
        return None

    def place_among_own(self, epoch: int, place: int, rank: int, world_size: int) -> int:
        """Number of this rank's rows before position `place` of an epoch."""
        begin = self.origin.sample if self.origin is not None and self.origin.epoch == epoch else 0
        steps, inside = divmod(place - begin, self.global_batch_size)
        before = begin + steps * self.global_batch_size
        share, rest = divmod(min(self.global_batch_size, self.num_samples - before), world_size)
        return max(0, before // world_size + inside - (rank * share + min(rank, rest)))

    def samples_at(self, positions: np.ndarray) -> np.ndarray:
        """Sample indices at positions of the endless sequence, int64 (n,). Many at once take little longer than one."""
        result = np.empty_like(positions)
        epochs = positions // self.num_samples
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._order(int(epoch), positions[chosen] - epoch * self.num_samples)
        return result

    def row_seeds(self, positions: np.ndarray) -> np.ndarray:
        """Seeds for reading the row at each position, uint64 (n,), computed only from seed, split, epoch and row."""
        epochs = positions // self.num_samples
        seeds = self.samples_at(positions).astype(np.uint64)
        for epoch in np.unique(epochs):
            key = np.uint64(stream_key(self.seed, "rows", self.name, int(epoch)))
            chosen = epochs == epoch
            seeds[chosen] = mixed(seeds[chosen] ^ key)
        return seeds

    def _order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return positions
        if self.group_sizes is None:
            return Permutation(self.num_samples, stream_key(self.seed, "data", self.name, epoch))(positions)
        return _windowed(self, epoch, positions)


def _windowed(plan: StepPlan, epoch: int, positions: np.ndarray) -> np.ndarray:
    order, starts, row_starts, windows = _group_layout(plan, epoch)
    result = np.empty_like(positions)
    window_of = np.searchsorted(windows, positions, side="right") - 1
    for window in np.unique(window_of):
        begin = windows[window]
        end = windows[window + 1] if window + 1 < len(windows) else plan.num_samples
        chosen = window_of == window
        shuffled = begin + Permutation(int(end - begin), stream_key(plan.seed, "data", plan.name, epoch, int(window)))(
            positions[chosen] - begin
        )
        group = np.searchsorted(starts, shuffled, side="right") - 1
        result[chosen] = row_starts[order[group]] + (shuffled - starts[group])
    return result


@lru_cache(maxsize=4)
def _group_layout(plan: StepPlan, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group order, start position of each ordered group, first row of each group, and start position of each window."""
    assert plan.group_sizes is not None
    sizes = np.asarray(plan.group_sizes, dtype=np.int64)
    order = Permutation(len(sizes), stream_key(plan.seed, "data", plan.name, epoch, "groups"))(
        np.arange(len(sizes), dtype=np.int64)
    )
    ordered = sizes[order]
    starts = np.concatenate([[0], np.cumsum(ordered)[:-1]])
    row_starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    windows = [0]
    for start, size in zip(starts, ordered, strict=True):
        if start + size - windows[-1] > plan.window_rows and start > windows[-1]:
            windows.append(int(start))
    return order, starts, row_starts, np.asarray(windows, dtype=np.int64)
