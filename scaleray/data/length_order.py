"""Order of rows of unequal length: rows of similar length together, and steps with a token budget.

Pure functions of seed, epoch, step and the rows' lengths, like the rest of the plan: steps are the same for any number
of workers, and a resumed run continues where it stopped.

Bucketing: the shuffled rows are taken in windows of `bucket_batches` global batches; within a window they are sorted by
length and cut into batches, whose order is shuffled again. The rows of a batch then have similar lengths, while the
order of lengths is random. Token batches: the concatenated rows of an epoch are cut into equal pieces of at most
`tokens_per_step` tokens; a step takes the rows that begin in its piece. Every epoch then has the same number of steps,
no row is cut, and a step differs from its piece by less than one row."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from scaleray.data.rank_batch import TokenCuts
from scaleray.data.sample_order import Permutation, StepPlan, stream_key


class Lengths:
    """Length of each row, int64 (n,). Hashable, and equal if all lengths are equal."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, dtype=np.int64)
        self.total = int(self.values.sum())
        self.longest = int(self.values.max(initial=0))
        self._digest = hashlib.sha256(self.values.tobytes()).digest()

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


@dataclass(frozen=True)
class LengthPlan(StepPlan):
    """Order of the samples of a split whose rows differ in length.

    bucket_batches: number of global batches sorted by length together, or None. tokens_per_step: maximum number of
    tokens in a step's piece of the epoch; `global_batch_size` is then only approximate. None: every step has exactly
    `global_batch_size` rows. tokens_per_micro_batch: maximum number of tokens in a micro-batch, or None if
    micro-batches are counted in rows."""

    lengths: Lengths = Lengths(())  # noqa: RUF009 - never changed
    bucket_batches: int | None = None
    tokens_per_step: int | None = None
    tokens_per_micro_batch: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch."""
        if self.tokens_per_step is None:
            return StepPlan.steps_per_epoch.fget(self)  # type: ignore[attr-defined]
        wanted = -(-self.lengths.total // self.tokens_per_step)
        # in a piece as long as the longest row, some row begins
        return max(1, min(wanted, self.lengths.total // max(1, self.lengths.longest)))

    @property
    def promise(self) -> str:
        """Guarantee about the order of samples, as text."""
        order = StepPlan.promise.fget(self)  # type: ignore[attr-defined]
        if self.bucket_batches is not None:
            order += f"; rows of similar length together, sorted within {self.bucket_batches} global batches"
        if self.tokens_per_step is not None:
            order += f"; steps of about {self.lengths.total / self.steps_per_epoch:.0f} tokens, in whole rows"
        return str(order)

    def num_rows(self, step: int) -> int:
        """Number of samples in the global batch of this step."""
        if self.tokens_per_step is None:
            return super().num_rows(step)
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        first, last = _bounds(self, epoch)[in_epoch : in_epoch + 2]
        return int(last - first)

    def place(self, step: int) -> tuple[int, int]:
        """Epoch of this step, and number of samples in that epoch before it."""
        if self.tokens_per_step is None:
            return super().place(step)
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, int(_bounds(self, epoch)[in_epoch])

    def token_cuts(self, step: int, rank: int, world_size: int) -> TokenCuts | None:
        """Bounds of a rank's micro-batches, each with at most `tokens_per_micro_batch` tokens, of rows in order."""
        most = self.tokens_per_micro_batch
        if most is None:
            return None
        lengths = self.lengths.values[self.global_indices(step)]
        parts = (self.rank_slice(step, other, world_size) for other in range(world_size))
        edges = [_cut_by_tokens(lengths[part], most) for part in parts]
        return TokenCuts(edges[rank], max(len(of_rank) - 1 for of_rank in edges))

    def _order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if self.bucket_batches is None:
            return super()._order(epoch, positions)
        return _bucketed(self, epoch)[positions]

    def order_before_buckets(self, epoch: int) -> np.ndarray:
        """All samples of an epoch in their order before bucketing."""
        return super()._order(epoch, np.arange(self.num_samples, dtype=np.int64))


def _cut_by_tokens(lengths: np.ndarray, most: int) -> tuple[int, ...]:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    edges = [0]
    while edges[-1] < len(lengths):
        fits = int(np.searchsorted(ends, ends[edges[-1]] + most, side="right")) - 1
        edges.append(max(fits, edges[-1] + 1))
    return tuple(edges)


@lru_cache(maxsize=4)
def _bucketed(plan: LengthPlan, epoch: int) -> np.ndarray:
    """All samples of an epoch, with rows of similar length together."""
    assert plan.bucket_batches is not None
    order, size = plan.order_before_buckets(epoch), plan.global_batch_size
    if plan.tokens_per_step is not None:
        size = -(-plan.num_samples // plan.steps_per_epoch)
    window = plan.bucket_batches * size
    pieces = []
    for number, start in enumerate(range(0, len(order), window)):
        rows = order[start : start + window]
        rows = rows[np.argsort(plan.lengths.values[rows], kind="stable")]
        # the last batch of an epoch may be a partial one, and stays its last
        whole = len(rows) // size
        key = stream_key(plan.seed, "buckets", plan.name, epoch, number)
        batches = Permutation(whole, key)(np.arange(whole, dtype=np.int64))
        # which rows are left over must not follow from their length
        left = len(rows) - whole * size
        if left:
            chosen = Permutation(len(rows), key ^ 1)(np.arange(left, dtype=np.int64))
            rows = np.concatenate([np.delete(rows, chosen), rows[np.sort(chosen)]])
        pieces += [rows[batch * size : (batch + 1) * size] for batch in batches] + [rows[whole * size :]]
    return np.concatenate(pieces)


@lru_cache(maxsize=4)
def _bounds(plan: LengthPlan, epoch: int) -> np.ndarray:
    """Number of samples in an epoch before each of its steps, then in total, int64 (steps + 1,)."""
    rows = plan.samples_at(epoch * plan.num_samples + np.arange(plan.num_samples, dtype=np.int64))
    begins = np.concatenate([[0], np.cumsum(plan.lengths.values[rows])[:-1]])
    steps = plan.steps_per_epoch
    cuts = np.arange(steps + 1, dtype=np.int64) * plan.lengths.total // steps
    return np.concatenate([[0], np.searchsorted(begins, cuts[1:-1], side="left"), [plan.num_samples]])
