"""A buffer of the state dict that the first pass registers."""

import torch
from recipe import Recipe, X, Y
from torch import nn

REFUSED = r"the buffer seen was added at step 1.*register it in build_model"


class Late(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        return super().forward(x)


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def build_model(self):
        return Late(4, 3)
