"""A head that is exchanged while the model is trained."""

from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"the parameter 2\.weight was replaced at step 3"


class Change:
    def on_step(self, run):
        if run.step == 2:
            run.model[2] = nn.Linear(5, 3).double()


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model

    def callbacks(self):
        return [Change()]
