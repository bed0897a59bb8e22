"""What recipes of the gallery share: a linear model on rows `x` (4 numbers) and `y` (a class of 3)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scaleray import Workload

NUM_ROWS = 24
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype(np.float32)
Y = (X @ np.random.default_rng(1).normal(size=(4, 3))).argmax(axis=1)


class Recipe(Workload):
    """A subclass gives `datasets()`; `prepare()` writes files into the current folder first."""

    @staticmethod
    def prepare():
        pass

    def build_model(self):
        return nn.Linear(4, 3)

    def loss(self, model, batch):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])
        return F.cross_entropy(model(x), y.long(), reduction="sum"), len(y)


class Rows(torch.utils.data.Dataset):
    """A subclass gives `row(index)`, the numbers of a row."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return {"x": self.row(int(index)), "y": Y[index]}
