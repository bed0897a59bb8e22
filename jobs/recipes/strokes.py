"""Ragged rows, as speech has them: handwritten digits of scikit-learn as strokes, the inked pixels of an image in order.

    scaleray train -c jobs/recipes/strokes.yaml

Rows have 16 to 42 points. The points of a row are moved a little at random while it is read; batches hold rows of one
length, count in points, and are padded to the longest.
"""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

from scaleray import Workload
from scaleray.data import Padding, Ragged


class Reader(nn.Module):
    """A recurrent network that reads the points, and the mean of its states over the points that are real.

    It reads one way: backwards it would begin with the padding, and depend on which rows share its batch.
    """

    def __init__(self, width):
        super().__init__()
        self.states = nn.GRU(3, width, batch_first=True)
        self.classes = nn.Linear(width, 10)

    def forward(self, points, is_real):
        states, _ = self.states(points)
        return self.classes((states * is_real[..., None]).sum(dim=1) / is_real.sum(dim=1, keepdim=True))


class Strokes(Workload):
    collate = Padding(mask="is_real")

    def __init__(self, width=96):
        self.width = width

    def build_model(self):
        return Reader(self.width)

    def datasets(self):
        images, labels = load_digits(return_X_y=True)
        points = [
            np.column_stack([*np.nonzero(i), i[i > 0]]).astype(np.float32) / 4 - 1 for i in images.reshape(-1, 8, 8)
        ]
        parts = {"train": slice(0, 1438), "val": slice(1438, None)}
        return {name: {"points": points[part], "label": labels[part]} for name, part in parts.items()}

    def transform(self, rows, rng, split):
        if split == "train":
            points = rows["points"]
            moved = 0.05 * np.repeat(rng.normal(2), points.lengths, axis=0).astype(np.float32)
            rows["points"] = Ragged(points.values + np.pad(moved, ((0, 0), (0, 1))), points.offsets)
        return rows

    def loss(self, model, batch):
        logits = model(batch["points"], batch["is_real"])
        return nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)

    def metrics(self, model, batch):
        logits = model(batch["points"], batch["is_real"])
        return {"accuracy": ((logits.argmax(1) == batch["label"]).sum(), len(logits))}
