"""Workloads with one mistake each, as users make them."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn

from scaleray import Workload


class Right(Workload):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def datasets(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(60, 4)).astype(np.float32)
        y = x[:, :3].argmax(axis=1)
        return {"train": {"x": x[:40], "y": y[:40]}, "val": {"x": x[40:], "y": y[40:]}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


class Mean(Right):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])


class MeanMetric(Right):
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).float().mean(), len(batch["y"]))}


class UnseenLabel(Right):
    def datasets(self):
        found = super().datasets()
        found["val"]["y"][13] = 3  # the model knows 0 to 2
        return found


class Double(Right):
    def build_model(self):
        return super().build_model().double()


class Unrepeatable(Right):
    def transform(self, rows, rng):
        rows["x"] = rows["x"] + np.random.default_rng().normal(size=rows["x"].shape).astype(np.float32)
        return rows


class OtherModelEachTime(Right):
    counts = itertools.count()

    def build_model(self):
        model = super().build_model()
        nn.init.constant_(model[2].bias, float(next(self.counts)))
        return model


class Unused(Right):
    def build_model(self):
        model = super().build_model()
        model.head = nn.Linear(8, 2)
        return model

    def loss(self, model, batch):
        logits = model[2](model[1](model[0](batch["x"])))
        return nn.functional.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model, batch):
        return {}


class InfiniteGradient(Right):
    def loss(self, model, batch):
        apart = model(batch["x"]) - model(batch["x"])
        return apart.square().sum(1).sqrt().sum() + super().loss(model, batch)[0], len(batch["y"])


class RaisesInTheLoss(Right):
    def loss(self, model, batch):
        return batch["labels"].sum(), 1


class Gaps(Right):
    def datasets(self):
        found = super().datasets()
        found["train"]["x"][:] = np.nan
        return found


class OtherColumns(Right):
    def datasets(self):
        found = super().datasets()
        found["val"]["x"] = found["val"]["x"].astype(np.float64)
        return found

    def metrics(self, model, batch):
        return super().metrics(model, {**batch, "x": batch["x"].float()})

    def loss(self, model, batch):
        return super().loss(model, {**batch, "x": batch["x"].float()})


class KnowsItsRank(Right):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return total * (1 + rank), count
