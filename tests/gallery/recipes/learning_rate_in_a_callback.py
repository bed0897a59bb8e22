"""A learning rate that a callback halves; the schedule would undo it."""

from recipe import Recipe, X, Y

REFUSED = r"the learning rate after on_step\(\) of callback Halve is .*return a schedule"


class Halve:
    def __init__(self, workload):
        self.workload = workload

    def on_step(self, run):
        for group in self.workload.made.param_groups:
            group["lr"] /= 2


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def optimizer(self, model, settings):
        import torch

        self.made = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
        return self.made

    def callbacks(self):
        return [Halve(self)]
