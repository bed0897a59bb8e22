"""A schedule that follows a measured value."""

from recipe import Recipe, X, Y
from torch.optim import lr_scheduler

REFUSED = r"schedule\(\) is .*ReduceLROnPlateau"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def schedule(self, optimizer, recipe):
        return lr_scheduler.ReduceLROnPlateau(optimizer)
