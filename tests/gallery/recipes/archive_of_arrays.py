"""An archive that opens its members when they are asked for, as HDF5 does."""

import numpy as np
from recipe import Recipe, Rows, X
from torch.utils.data import Subset


class Archive(Rows):
    def __init__(self):
        self.members = None

    def row(self, index):
        if self.members is None:
            self.members = np.load("rows.npz")
        return self.members["x"][index]


class Workload(Recipe):
    @staticmethod
    def prepare():
        np.savez("rows.npz", x=X)

    def datasets(self):
        rows = Archive()
        return {"train": Subset(rows, range(16)), "val": Subset(rows, range(16, 24))}
