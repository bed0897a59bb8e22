"""A slope that a callback changes: an attribute of a module."""

from recipe import Recipe, X, Y
from torch import nn


class Change:
    def on_step(self, run):
        run.model[1].negative_slope = 0.1 * run.step


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model[1] = nn.LeakyReLU(0.1)
        return model

    def callbacks(self):
        return [Change()]
