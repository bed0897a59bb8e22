"""Weights that are complex numbers."""

import torch
from recipe import Recipe, X, Y
from torch import nn


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (torch.fft.rfft(x) @ self.weight).real


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return Fourier()
