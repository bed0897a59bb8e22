"""torch's Muon, which needs whole matrices."""

import torch
from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(5, 3, bias=False))

    def optimizer(self, model, settings):
        return torch.optim.Muon(model.parameters(), lr=settings.learning_rate)
