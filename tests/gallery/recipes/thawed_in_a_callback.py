"""A backbone that is frozen for two steps."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"the parameter 0\.weight was frozen and is trained from step 3 on.*fine_tuning\.freeze"


class Change:
    def on_step(self, run):
        if run.step == 2:
            run.model[0].requires_grad_(True)


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        return model

    def callbacks(self):
        return [Change()]
