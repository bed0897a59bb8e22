"""Random numbers for a transform: each row of a block draws from its own seed.

Counter-based (splitmix64, Steele et al. 2014): a number is computed from the row's seed, the index of the call and its
position in the row, independently of other rows. A row therefore draws the same numbers in every process, in any block,
on any number of workers and after a resume, and whole blocks are drawn with vector instructions."""

import math
from collections.abc import Sequence

import numpy as np

from scaleray.data.sample_order import mixed

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64


class RowRandom:
    """Random numbers for the rows of a block. Each call of a method returns new numbers, in arrays with the rows along
    the first dimension. seeds: one for each row, uint64 (n,)."""

    def __init__(self, seeds: np.ndarray) -> None:
        self.seeds = np.asarray(seeds, dtype=np.uint64)
        self._calls = 0

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def has_drawn(self) -> bool:
        """Whether any number was drawn."""
        return self._calls > 0

    def random(self, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Uniform numbers from 0 to below 1, float64 (n, *shape)."""
        return (self._bits(shape) >> np.uint64(11)) * 2.0**-53

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Uniform numbers from `low` to below `high`, float64 (n, *shape)."""
        result: np.ndarray = low + (high - low) * self.random(shape)
        return result

    def integers(self, low: int, high: int | None = None, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Integers from `low` to below `high` (from 0 to below `low` if `high` is omitted), int64 (n, *shape).

        low, high: numbers, or arrays that broadcast to (n, *shape): a separate limit for each row."""
        first, end = (0, low) if high is None else (low, high)
        if np.any(np.asarray(end) <= np.asarray(first)):
            raise ValueError(f"integers({first}, {end}): the upper limit must be above the lower one")
        # a product instead of a remainder: as even, and exact below 2^53
        return np.asarray(first + np.floor(self.random(shape) * (np.asarray(end) - first)), dtype=np.int64)

    def normal(self, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Standard normal numbers, float64 (n, *shape)."""
        from scipy.special import ndtri  # by the inverse distribution: a loop of scalars, so the same bits in any block

        result: np.ndarray = ndtri(((self._bits(shape) >> np.uint64(12)) + 0.5) * 2.0**-52)
        return result

    def permutation(self, size: int) -> np.ndarray:
        """A random order of range(size) for each row, int64 (n, size)."""
        return np.argsort(self._bits(size), axis=1, kind="stable")

    def generators(self) -> list[np.random.Generator]:
        """A numpy Generator for each row, for code that handles one row at a time; slower than the other methods."""
        return [np.random.Generator(np.random.Philox(key=int(seed))) for seed in self._bits(())]

    def _bits(self, shape: int | Sequence[int]) -> np.ndarray:
        """Random bits, uint64 (n, *shape)."""
        self._calls += 1
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        with np.errstate(over="ignore"):
            start = mixed(self.seeds + np.uint64(self._calls) * GOLDEN)
            steps = np.arange(1, math.prod(sizes) + 1, dtype=np.uint64) * GOLDEN
            return mixed(start[:, None] + steps).reshape(len(self.seeds), *sizes)
