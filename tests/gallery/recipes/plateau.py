"""A schedule that follows the evaluations."""

from recipe import Recipe, X, Y
from torch.optim import lr_scheduler


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:9], "y": Y[:9]}}

    def schedule(self, optimizer, recipe):
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
