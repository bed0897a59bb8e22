"""A function with a backward pass of its own."""

import torch
import torch.nn.functional as F
from recipe import Recipe, X, Y


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (10 * x).round() / 10

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def loss(self, model, batch):
        return F.cross_entropy(Straight.apply(model(batch["x"])), batch["y"], reduction="sum"), len(batch["y"])
