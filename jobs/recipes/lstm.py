"""A stateful LSTM over the bytes of Python's own source, with truncated backpropagation through time.

    scaleray train -c jobs/recipes/lstm.yaml

Each of 32 lanes is a contiguous part of the text: its hidden state goes from batch to batch, its gradient does not.
"""

import asyncio
import email
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from scaleray import CarriedState, TokenSource, Workload


def source_of(package):
    files = sorted(Path(package.__file__).parent.glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


class Lstm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(256, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens, h, c):
        output, (h, c) = self.lstm(self.embedding(tokens), (h, c))
        return self.head(output), h, c


class Bytes(Workload):
    def __init__(self, width=128, lanes=32):
        self.width, self.lanes = width, lanes
        self.carried = CarriedState(self.initial, lanes=lanes)

    def initial(self, model, rows):
        weight = model.head.weight
        return {name: torch.zeros(rows, self.width, dtype=weight.dtype, device=weight.device) for name in "hc"}

    def build_model(self):
        return Lstm(self.width)

    def datasets(self):
        texts = {"train": source_of(asyncio), "val": source_of(email)}
        return {n: TokenSource(text, sequence_length=64, lanes=self.lanes) for n, text in texts.items()}

    def callbacks(self):
        return [self.carried]

    def loss(self, model, batch):
        tokens, state = batch["tokens"].long(), self.carried.of(model, batch)
        logits, h, c = model(tokens[:, :-1], state["h"][None], state["c"][None])
        self.carried.keep(model, batch, state, {"h": h[0], "c": c[0]})
        target = tokens[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum"), len(target)

    def metrics(self, model, batch):
        total, count = self.loss(model, batch)
        return {"loss": (total, count), "bits_per_byte": (total / math.log(2), count)}
