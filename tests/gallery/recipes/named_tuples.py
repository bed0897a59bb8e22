"""Rows that are named tuples."""

from typing import NamedTuple

import numpy as np
from recipe import Recipe, Rows, X, Y


class Pair(NamedTuple):
    x: np.ndarray
    y: int


class Named(Rows):
    def __getitem__(self, index):
        return Pair(X[index], Y[index])


class Workload(Recipe):
    def datasets(self):
        return {"train": Named()}
