"""A model of which nothing is trained."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"has no trainable parameters"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.Linear(4, 3).requires_grad_(False)
