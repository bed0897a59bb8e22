"""A loss that is not a number at the second step."""

from recipe import Recipe, X, Y

REFUSED = r"NaN|nan|not finite"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    passes = 0

    def loss(self, model, batch):
        self.passes += 1
        total, count = super().loss(model, batch)
        return (total * float("nan") if self.passes > 5 else total), count
