"""Sequences of unequal length, as speech has them: tones that rise, fall, swing or stay, from 20 to 80 frames of 12 features;
a recurrent network says which. `collate` pads them, and the loss counts rows."""

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from scaleray import Workload
from scaleray.data import Padding

SHAPES = (lambda t: t, lambda t: 1 - t, lambda t: 0.5 + 0.5 * np.sin(12 * t), lambda t: 0.5 + 0 * t)


class Listener(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ear, self.head = nn.GRU(12, width, batch_first=True), nn.Linear(width, len(SHAPES))

    def forward(self, frames, mask):
        heard = self.ear(frames)[0]
        return self.head((heard * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Speech(Workload):
    collate = Padding()

    def build_model(self):
        return Listener(32)

    def datasets(self):
        draw, frames, labels = np.random.default_rng(0), [], []
        for number in range(1000):
            t = np.linspace(0, 1, draw.integers(20, 80))
            pitch = SHAPES[number % 4](t)[:, None] * 12
            tone = np.exp(-((np.arange(12) - pitch) ** 2) / 4) + draw.normal(0, 0.5, (len(t), 12))
            frames.append(tone.astype(np.float32)), labels.append(number % 4)
        return {
            "train": {"frames": frames[:800], "label": np.array(labels[:800])},
            "test": {"frames": frames[800:], "label": np.array(labels[800:])},
        }

    def loss(self, model, batch):
        logits = model(batch["frames"], batch["mask"].to(batch["frames"]))
        return cross_entropy(logits, batch["label"], reduction="sum"), len(logits)

    def metrics(self, model, batch):
        right = model(batch["frames"], batch["mask"].to(batch["frames"])).argmax(1) == batch["label"]
        return {"accuracy": (right.sum(), len(right))}
