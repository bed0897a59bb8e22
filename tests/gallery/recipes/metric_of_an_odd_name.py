"""A metric that is called recall@2."""

from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def metrics(self, model, batch):
        best = model(batch["x"]).topk(2).indices
        return {"recall@2": ((best == batch["y"][:, None]).any(dim=1).sum(), len(batch["y"]))}
