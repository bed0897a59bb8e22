"""An embedding with sparse gradients."""

from recipe import Recipe, X, Y
from torch import nn

FLAGS = {"optimizer.clip_norm": 1.0}


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.Embedding(3, 2, sparse=True)

    def loss(self, model, batch):
        return (model(batch["y"]) - batch["x"][:, :2]).square().sum(), len(batch["y"])
