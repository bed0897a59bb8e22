"""Noise from the generators of the process."""

import random

import torch
from recipe import Recipe, Rows, X


class Noisy(Rows):
    def row(self, index):
        return X[index] + 0.1 * torch.randn(4).numpy() + random.random()


class Workload(Recipe):
    def datasets(self):
        return {"train": Noisy()}
