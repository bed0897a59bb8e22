"""A schedule in two parts."""

from recipe import Recipe, X, Y
from torch.optim import lr_scheduler


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def schedule(self, optimizer, recipe):
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, recipe.total_steps - 2)
        return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
