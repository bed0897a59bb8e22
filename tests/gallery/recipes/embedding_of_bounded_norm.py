"""An embedding that its forward pass renormalises."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED_ON_TWO = r"max_norm is 0\.5: its forward pass changes the rows"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.Embedding(3, 2, max_norm=0.5)

    def loss(self, model, batch):
        return (model(batch["y"]) - batch["x"][:, :2]).square().sum(), len(batch["y"])
