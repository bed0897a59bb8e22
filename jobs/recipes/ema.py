"""Digits with few labels and large steps: the trained weights swing, and what is evaluated and kept is their moving average
(`averaging.decay` of the config; the workload knows nothing of it)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from scaleray import Workload


class AveragedDigits(Workload):
    def build_model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def datasets(self):
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
        x, y = (pixels[order] / 16).astype("float32"), labels[order]
        return {"train": {"x": x[:600], "y": y[:600]}, "test": {"x": x[600:], "y": y[600:]}}

    def loss(self, model, batch):
        return cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}
