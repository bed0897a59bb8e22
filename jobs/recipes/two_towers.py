"""Two towers with in-batch negatives: the left half of a digit must find its own right half among all of the batch.

scaleray train -c jobs/recipes/two_towers.yaml
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from scaleray import Workload


class TwoTowers(Workload):
    def build_model(self):
        tower = lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
        model = nn.ModuleDict({"left": tower(), "right": tower(), "scale": nn.Linear(1, 1, bias=False)})
        nn.init.constant_(model["scale"].weight, 2.3)
        return model

    def datasets(self):
        images = load_digits().images.astype("float32") / 16
        return {"train": {"image": images[:1440]}, "val": {"image": images[1440:]}}

    def outputs(self, model, batch):
        left, right = batch["image"].split(4, dim=2)
        scale = model["scale"](torch.ones_like(left[:, 0, :1])).exp()  # one over a learned temperature, for each row
        return {"left": F.normalize(model["left"](left)), "right": F.normalize(model["right"](right)), "scale": scale}

    def batch_loss(self, outputs):
        scores = outputs["scale"] * outputs["left"] @ outputs["right"].T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="sum"), len(scores)
