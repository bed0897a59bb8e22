"""A layer that learns its width from the first batch."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"lazy parameters.*dummy batch"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return nn.LazyLinear(3)
