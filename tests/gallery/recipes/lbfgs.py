"""An optimizer that wants to compute the loss itself."""

import torch
from recipe import Recipe, X, Y

REFUSED = r"LBFGS|closure"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def optimizer(self, model, settings):
        return torch.optim.LBFGS(model.parameters(), lr=settings.learning_rate)
