"""Workloads that have what digits lack and dashboards show: tokens, long evaluations, and rows of a Ray Dataset."""

from __future__ import annotations

import time

import numpy as np
import torch.nn.functional as F
from torch import nn

from scaleray import Workload
from scaleray.data import TokenSource

VOCABULARY, LENGTH, WIDTH = 32, 16, 8
ROWS = 300_000
EVALUATION_S = 3.0


class Tokens(Workload):
    """Predicts the next of made-up tokens. An evaluation takes seconds."""

    def build_model(self):
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def datasets(self):
        draw = np.random.default_rng(0)
        return {
            "train": TokenSource(
                draw.integers(0, VOCABULARY, 4096 * LENGTH + 1, dtype=np.uint8), sequence_length=LENGTH
            ),
            "test": TokenSource(draw.integers(0, VOCABULARY, 64 * LENGTH + 1, dtype=np.uint8), sequence_length=LENGTH),
        }

    def loss(self, model, batch):
        if not model.training:
            time.sleep(EVALUATION_S)
        tokens = batch["tokens"].long()
        return F.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        ), tokens.numel()


class Streamed(Workload):
    """A regression on rows of a Ray Dataset, enough of them for few epochs: Ray's page of metrics grows with each."""

    def build_model(self):
        return nn.Linear(WIDTH, 1)

    def datasets(self):
        import ray.data

        rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
        # a function of this module would be looked for by its name, in tasks that do not know the module
        return {
            "train": ray.data.from_numpy(rows).map_batches(
                lambda read: {"x": read["data"], "y": read["data"].sum(axis=1, keepdims=True)}
            )
        }

    def loss(self, model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
