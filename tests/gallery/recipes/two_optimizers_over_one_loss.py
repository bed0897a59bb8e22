"""A pair of optimizers for the parts of one loss."""

import torch
from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def optimizer(self, model, settings):
        first, second = model.parameters()
        return {"weight": torch.optim.SGD([first], lr=0.1), "bias": torch.optim.Adam([second], lr=0.01)}
