"""A loss without what it was summed over."""

import torch.nn.functional as F
from recipe import Recipe, X, Y

REFUSED = r"loss\(\)"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
