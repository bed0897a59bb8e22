"""A generator and a critic with an optimizer each."""

import torch
from recipe import Recipe, X, Y
from torch import nn

from scaleray import Workload as WithoutLoss


class Workload(WithoutLoss):
    prepare = staticmethod(Recipe.prepare)

    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.ModuleDict({"maker": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})

    def optimizer(self, model, settings):
        return {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()}

    def losses(self):
        return {"critic": self.critic, "maker": self.maker}

    def critic(self, model, batch):
        made = model["maker"](batch["x"]).detach()
        return (model["critic"](made) - model["critic"](batch["x"])).tanh().sum(), len(made)

    def maker(self, model, batch):
        return -model["critic"](model["maker"](batch["x"])).tanh().sum(), len(batch["x"])
