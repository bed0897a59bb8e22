"""A layer whose weight is a direction and a length."""

from recipe import Recipe, X, Y
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        return nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
