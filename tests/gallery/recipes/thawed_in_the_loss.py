"""A layer that the loss thaws at its third pass in training."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"the parameter 0\.weight was frozen and is trained from step \d on"


class Workload(Recipe):
    passes = 0

    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        return model

    def loss(self, model, batch):
        self.passes += 1
        model[0].requires_grad_(self.passes > 3)
        return super().loss(model, batch)
