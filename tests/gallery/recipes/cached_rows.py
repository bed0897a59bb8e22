"""Rows that are computed once and kept in an array."""

import numpy as np
from recipe import Recipe, Rows, X


class Cached(Rows):
    def __init__(self):
        self.x, self.is_there = np.zeros_like(X), np.zeros(len(X), bool)

    def row(self, index):
        if not self.is_there[index]:
            self.x[index], self.is_there[index] = np.tanh(X[index]), True
        return self.x[index]


class Workload(Recipe):
    def datasets(self):
        return {"train": Cached()}
