"""A table in Parquet, scaled by preprocessors of Ray Data, and a small network that tells malign from benign."""

import tempfile
from pathlib import Path

import torch
from ray.data.preprocessors import StandardScaler
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from scaleray import ParquetSource, Workload

FOLDER = Path(tempfile.gettempdir(), "scaleray-recipes")
TABLE = load_breast_cancer(as_frame=True)


class ParquetTable(Workload):
    def preprocessor(self):
        return StandardScaler(columns=list(TABLE.feature_names))

    def build_model(self):
        return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))

    def datasets(self):
        rows = TABLE.frame.sample(frac=1, random_state=0)
        FOLDER.mkdir(exist_ok=True)
        for name, part in (("train", rows[:456]), ("test", rows[456:])):
            part.to_parquet(FOLDER / f"{name}.parquet", row_group_size=64, index=False)
        return {name: ParquetSource(FOLDER / f"{name}.parquet") for name in ("train", "test")}

    def logits(self, model, batch):
        return model(torch.stack([batch[name] for name in TABLE.feature_names], dim=1).to(model[0].weight))[:, 0]

    def loss(self, model, batch):
        logits = self.logits(model, batch)
        return binary_cross_entropy_with_logits(logits, batch["target"].to(logits.dtype), reduction="sum"), len(logits)

    def metrics(self, model, batch):
        right = (self.logits(model, batch) > 0) == (batch["target"] > 0)
        return {"accuracy": (right.sum(), len(right))}
