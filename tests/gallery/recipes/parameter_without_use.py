"""A layer that the loss does not depend on."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED_ON_TWO = r"a trained parameter has no gradient.*find-unused-parameters"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})

    def loss(self, model, batch):
        return super().loss(model["used"], batch)
