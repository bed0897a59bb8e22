"""Weights of rows in place of a weighted sampler."""

import numpy as np
import torch.nn.functional as F
from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y, "weight": 1.0 / np.bincount(Y, minlength=3)[Y]}}

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["weight"]).sum(), batch["weight"].sum()
