"""A layer that is frozen after two steps."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"the parameter 0\.weight is frozen from step 3 on"


class Change:
    def on_step(self, run):
        if run.step == 2:
            run.model[0].requires_grad_(False)


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model

    def callbacks(self):
        return [Change()]
