"""One small training for all tests of what is done with its model."""

from __future__ import annotations

import shutil

import pytest

WORKLOAD = '''
import numpy as np
import torch
from torch import nn
from scaleray import Workload


class Points(Workload):
    """Which of three corners a point belongs to."""

    def __init__(self, width=8):
        self.width = width

    def build_model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Dropout(0.5), nn.Linear(self.width, 3))

    def datasets(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(90, 4)).astype(np.float32)
        y = x[:, :3].argmax(axis=1)
        return {"train": {"x": x[:64], "y": y[:64]}, "val": {"x": x[64:], "y": y[64:]}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


class Named(Points):
    def predict(self, model, batch):
        logits = model(batch["x"])
        return {"corner": logits.argmax(1), "name": [f"c{k}" for k in logits.argmax(1).tolist()]}


class Picky(Points):
    def predict(self, model, batch):
        if (batch["x"] > 50).any():
            raise ValueError("a point outside of the room")
        return {"corner": model(batch["x"]).argmax(1)}


class Short(Points):
    def predict(self, model, batch):
        return {"corner": model(batch["x"]).argmax(1)[:-1]}


class Scaled(Points):
    def transform(self, rows, rng, split):
        assert split in ("train", "val", "predict", "holdout", "data"), split
        return {**rows, "x": rows.pop("tenths") * np.float32(0.1)}

    def datasets(self):
        return {n: {"tenths": 10 * r["x"], "y": r["y"]} for n, r in super().datasets().items()}


class Scale:
    """Divides by the largest value, and gives words their numbers."""

    def fit(self, columns):
        self.largest = float(np.abs(columns["tenths"]).max())
        self.words = sorted(set(columns["corner"].tolist()))

    def transform(self, columns):
        columns["x"] = (columns.pop("tenths") / self.largest).astype(np.float32)
        columns["y"] = np.array([self.words.index(word) for word in columns.pop("corner")])
        return columns


class Words(Points):
    """Labels that are words, and features of another size."""

    def datasets(self):
        return {
            name: {"tenths": 10 * rows["x"], "corner": np.array(["a", "b", "c"])[rows["y"]]}
            for name, rows in super().datasets().items()
        }

    def preprocessor(self):
        return Scale()


class Collated(Points):
    def collate(self, rows):
        return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


class Twice(Points):
    def loss(self, model, batch):
        model(batch["x"])
        return super().loss(model, batch)


class InParts(Points):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model[3](model[0](batch["x"])), batch["y"], reduction="sum"), 1


class Counting(Points):
    """Counts the rows that it has seen, and keeps their mean."""
    seen, mean = 0, torch.zeros(4)

    def loss(self, model, batch):
        if model.training:
            self.mean = (self.mean * self.seen + batch["x"].sum(0)) / (self.seen + len(batch["x"]))
            self.seen += len(batch["x"])
        return super().loss(model, batch)

    def state_dict(self):
        return {"seen": self.seen, "inner": {"mean": self.mean}}

    def load_state_dict(self, state):
        self.seen, self.mean = state["seen"], state["inner"]["mean"]


class Annealed(Points):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.LeakyReLU(0.1), nn.Linear(self.width, 3))

    def callbacks(self):
        return [Anneal()]


class Anneal:
    def on_step(self, run):
        run.model[1].negative_slope = 0.1 * run.step


class LabelsFirst(Points):
    def loss(self, model, batch):
        labels = batch["y"]
        return nn.functional.cross_entropy(model(batch["x"]), labels, reduction="sum"), len(labels)
'''


@pytest.fixture(scope="session")
def trained(tmp_path_factory, empty_database):
    """The record of a training of 24 steps with two checkpoints."""
    import scaleray

    folder = tmp_path_factory.mktemp("trained")
    (folder / "points.py").write_text(WORKLOAD)
    database = shutil.copy(empty_database, folder / "mlflow.db")
    config = {
        "workload.name": f"{folder}/points.py:Points",
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.02,
        "stop.after": "3 epochs",
        "evaluation.every": "1 epoch",
        "checkpoint.every": "8 steps",
        "checkpoint.best": "val/loss min",
        "checkpoint.keep_last": 3,
        "checkpoint.storage_path": str(folder / "runs"),
        "tracking.uri": f"sqlite:///{database}",
        "tracking.run_name": "points",
        "tracking.system_metrics": False,
    }
    return scaleray.train(config, local=True)


@pytest.fixture(scope="module", autouse=True)
def mlflow_in_use(trained):
    """The MLflow that has that run, as the user's environment names it: the one that a record names is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", trained.tracking_uri)
        yield


@pytest.fixture
def run(trained):
    """The folder of that run."""
    return trained.run_dir


@pytest.fixture
def classes(run):
    """The module with workloads of the same model."""
    from scaleray.models.trained_run import find_trained, workload_of

    workload = workload_of(find_trained(run))
    import sys

    return sys.modules[type(workload).__module__]
