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


class BatchNegatives(Right):
    """The negatives of a row are the other rows of its batch."""

    def loss(self, model, batch):
        scores = model(batch["x"]) @ model(batch["x"]).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


class NegativesOfMicroBatches(BatchNegatives):
    depends_on_micro_batch = True


class WholeBatchNegatives(BatchNegatives):
    loss = None

    def outputs(self, model, batch):
        return {"one": model(batch["x"])}

    def batch_loss(self, outputs):
        scores = outputs["one"] @ outputs["one"].T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


class Dice(Right):
    """One number for a batch, which is neither a sum nor a mean over its rows."""

    def loss(self, model, batch):
        found, true = model(batch["x"]).softmax(1)[:, 0], (batch["y"] == 0).to(batch["x"].dtype)
        return (1 - 2 * (found * true).sum() / (found.sum() + true.sum() + 1)) * len(true), len(true)


class DrawsInItsLoss(Right):
    def loss(self, model, batch):
        x = batch["x"] + torch.randn_like(batch["x"])
        return nn.functional.cross_entropy(model(x), batch["y"], reduction="sum"), len(batch["y"])


class BatchMetric(Right):
    """A value of a batch that is no sum of values of rows."""

    def metrics(self, model, batch):
        return {"squared": (model(batch["x"]).sum() ** 2, len(batch["y"]))}


class Objects(Right):
    """The form of docs/workloads.md for torchmetrics: metrics() gives the arguments of update."""

    def metric_objects(self):
        from torchmetrics.classification import MulticlassAUROC

        return {"auroc": MulticlassAUROC(3)}

    def metrics(self, model, batch):
        return {"auroc": (model(batch["x"]).softmax(1), batch["y"])}


class WrongArguments(Objects):
    def metrics(self, model, batch):
        return {"auroc": (batch["y"],)}


class LossesAlone(Workload):
    """Two optimizers and losses, without `loss`; training alone has noise."""

    def build_model(self):
        return nn.ModuleDict({"one": nn.Linear(4, 3), "other": nn.Linear(4, 3)})

    datasets = Right.datasets

    def transform(self, rows, rng, split):
        if split == "train":
            rows["noise"] = rng.normal((4,)).astype("float32")
        return rows

    def optimizer(self, model, settings):
        return {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in ("one", "other")}

    def losses(self):
        return {name: lambda model, batch, name=name: self._loss(model[name], batch) for name in ("one", "other")}

    def _loss(self, model, batch):
        x = batch["x"] + 0.1 * batch["noise"]
        return nn.functional.cross_entropy(model(x), batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model, batch):
        return {"accuracy": ((model["one"](batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


class OneIsAMean(LossesAlone):
    def losses(self):
        return {**super().losses(), "other": self._mean}

    def _mean(self, model, batch):
        total, count = self._loss(model["other"], batch)
        return total / count, count


class NeedsAMissingColumn(Right):
    """The loss of val needs what the transform gives to training alone."""

    transform = LossesAlone.transform

    def metrics(self, model, batch):
        return {}

    def loss(self, model, batch):
        return super().loss(model, {**batch, "x": batch["x"] + 0.1 * batch["noise"]})


class SparseGradient(Right):
    """Of the nearest whole number of each value the sum of the vectors."""

    def build_model(self):
        return nn.Sequential(nn.EmbeddingBag(400, 8, sparse=True), nn.Linear(8, 3))

    def datasets(self):
        return {
            name: {**rows, "x": (rows["x"] * 50 + 200).round().astype(int)} for name, rows in super().datasets().items()
        }


class OneLabel(Right):
    def datasets(self):
        return {name: {**rows, "y": 0 * rows["y"]} for name, rows in super().datasets().items()}


class EmptyImages(Right):
    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

    def datasets(self):
        return {
            name: {**rows, "x": np.zeros((len(rows["y"]), 3, 2, 2), np.uint8)}
            for name, rows in super().datasets().items()
        }

    def loss(self, model, batch):
        return super().loss(model, {**batch, "x": batch["x"].float()})

    def metrics(self, model, batch):
        return {}


class SparseBuffer(Right):
    """A graph network's adjacency matrix; a part is made in float32, so that the model knows no float64."""

    layout = staticmethod(torch.Tensor.to_sparse)

    def build_model(self):
        class Net(nn.Module):
            def __init__(self, layout):
                super().__init__()
                self.layer = nn.Linear(4, 3)
                self.register_buffer("adjacency", layout(torch.eye(4)))

            def forward(self, x):
                return self.layer((self.adjacency @ x.float().T).T)

        return Net(self.layout)


class Compiled(Right):
    def build_model(self):
        class Net(nn.Sequential):
            __len__ = None  # a module without a length has no truth either

        return torch.compile(Net(nn.Linear(4, 3)), backend="eager")
