"""An IterableDataset: which of Python's own packages a line of source is from, read file by file as text.

    scaleray train -c jobs/recipes/source_lines.yaml

Nobody knows the number of lines before they are read. Every worker reads all and keeps its own; the words of a line are
hashed, and put one after another, as an EmbeddingBag needs no padding.
"""

import asyncio
import email
import re
import unittest
import zlib
from pathlib import Path

import numpy as np
from torch import nn
from torch.utils.data import IterableDataset

from scaleray import Workload
from scaleray.data import Flattening

PACKAGES = [asyncio, email, unittest]


class Lines(IterableDataset):
    """Lines with two words or more: those whose hash is a multiple of five for validation, the others to train."""

    def __init__(self, buckets, *, validates):
        self.buckets, self.validates = buckets, validates

    def __iter__(self):
        for label, package in enumerate(PACKAGES):
            for file in sorted(Path(package.__file__).parent.glob("*.py")):
                for line in file.read_text().splitlines():
                    words = re.findall(r"\w+|[^\w\s]", line)
                    if len(words) > 1 and (zlib.crc32(line.encode()) % 5 == 0) == self.validates:
                        hashed = [zlib.crc32(word.encode()) % self.buckets for word in words]
                        yield {"words": np.array(hashed), "label": label}


class SourceLines(Workload):
    collate = Flattening()

    def __init__(self, buckets=8192, width=64):
        self.buckets, self.width = buckets, width

    def build_model(self):
        return nn.ModuleList([nn.EmbeddingBag(self.buckets, self.width), nn.Linear(self.width, len(PACKAGES))])

    def datasets(self):
        return {"train": Lines(self.buckets, validates=False), "val": Lines(self.buckets, validates=True)}

    def logits(self, model, batch):
        return model[1](model[0](batch["words"], batch["words_offsets"][:-1]))

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(self.logits(model, batch), batch["label"], reduction="sum")
        return loss, len(batch["label"])

    def metrics(self, model, batch):
        return {"accuracy": ((self.logits(model, batch).argmax(1) == batch["label"]).sum(), len(batch["label"]))}
