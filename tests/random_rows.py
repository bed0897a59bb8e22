"""Datasets whose rows draw random numbers: from each global generator, from their own, for one row only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from small_runs import NUM_FEATURES, Classify, WithDropout, rows


class Augmented(torch.utils.data.Dataset):
    """Labelled rows with noise from torch, numpy and `random`, a third of the features each. reads: rows read so far."""

    def __init__(self, num_rows: int = 26, *, seed: int = 0) -> None:
        self.rows, self.reads = rows(num_rows, seed=seed), 0

    def __len__(self) -> int:
        return len(self.rows["y"])

    def noise(self, index: int) -> np.ndarray:
        third = NUM_FEATURES // 3
        drawn = [torch.rand(third).tolist(), np.random.random(third), [random.random() for _ in range(third)]]
        return np.concatenate(drawn).astype(np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"x": self.rows["x"][index] + self.noise(index), "y": self.rows["y"][index]}


class Unmoved(Augmented):
    """The rows themselves."""

    def noise(self, index: int) -> np.ndarray:
        return np.zeros(NUM_FEATURES, np.float32)


class DrawsForNothing(Augmented):
    """The rows themselves, and random numbers that nobody uses."""

    def noise(self, index: int) -> np.ndarray:
        return super().noise(index) * 0


class RarelyDraws(Augmented):
    """Draws for one row, which a look at a few rows passes over."""

    def noise(self, index: int) -> np.ndarray:
        return super().noise(index) if index == 5 else np.zeros(NUM_FEATURES, np.float32)


class OwnGenerator(Augmented):
    """Draws from a generator that nobody else knows. only: the row for which it does; None is all."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.draw, self.only = np.random.default_rng(), only

    def noise(self, index: int) -> np.ndarray:
        return self.draw.random(NUM_FEATURES, dtype=np.float32) * (self.only in (None, index))


class Training(Classify):
    """Classification of the rows that a dataset gives. dropout: of half of the hidden units."""

    def __init__(self, dataset: Any, *, val: Any = None, dropout: bool = False) -> None:
        super().__init__()
        self.dataset, self.val, self.dropout = dataset, val, dropout

    def build_model(self) -> torch.nn.Module:
        return WithDropout.build_model(self) if self.dropout else super().build_model()

    def datasets(self) -> dict[str, Any]:
        return {"train": self.dataset, **({"val": self.val} if self.val is not None else {})}
