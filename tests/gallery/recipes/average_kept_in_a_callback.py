"""A slow copy of the weights that a callback keeps inside of the model."""

from recipe import Recipe, X, Y
from torch import nn


class Average:
    def on_step(self, run):
        for slow, fast in zip(run.model["slow"].parameters(), run.model["fast"].parameters(), strict=True):
            slow.lerp_(fast, 0.5)


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.ModuleDict({"fast": nn.Linear(4, 3), "slow": nn.Linear(4, 3).requires_grad_(False)})

    def loss(self, model, batch):
        return super().loss(model["fast" if model.training else "slow"], batch)

    def callbacks(self):
        return [Average()]
