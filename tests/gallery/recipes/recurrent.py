"""An LSTM over the numbers of a row."""

import torch.nn.functional as F
from recipe import Recipe, X, Y
from torch import nn


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.ModuleDict({"body": nn.LSTM(1, 4, batch_first=True), "head": nn.Linear(4, 3)})

    def loss(self, model, batch):
        _, (hidden, _) = model["body"](batch["x"][..., None])
        return F.cross_entropy(model["head"](hidden[-1]), batch["y"], reduction="sum"), len(batch["y"])
