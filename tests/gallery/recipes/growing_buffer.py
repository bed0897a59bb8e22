"""A buffer that grows by a row with each batch, and one that is filled at the first."""

import torch
from recipe import Recipe, X, Y
from torch import nn


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("codes", None)

    def forward(self, x):
        if self.training:
            self.bank = torch.cat([self.bank, torch.full((1, 4), 0.1 * len(self.bank)).to(self.bank)])
            self.codes = torch.ones_like(self.bank[0]) if self.codes is None else self.codes
        return self.head(x + self.bank.sum(dim=0) + (0 if self.codes is None else self.codes))


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}, "val": {"x": X[:8], "y": Y[:8]}}

    def build_model(self):
        return Bank()
