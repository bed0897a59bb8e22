"""A handle that lies in the cache of a function."""

import functools

import numpy as np
from recipe import Recipe, Rows, X


@functools.cache
def opened(path):
    return open(path, "rb", buffering=0)


class Cached(Rows):
    def row(self, index):
        opened("x.bin").seek(16 * index)
        return np.frombuffer(opened("x.bin").read(16), np.float32)


class Workload(Recipe):
    @staticmethod
    def prepare():
        X.tofile("x.bin")

    def datasets(self):
        return {"train": Cached(), "val": Cached()}
