"""A schedule with fewer steps than the training."""

from recipe import Recipe, X, Y
from torch.optim import lr_scheduler

REFUSED = r"schedule\(\)"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def schedule(self, optimizer, recipe):
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
