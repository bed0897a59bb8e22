"""TIFF images of floats, whose range nothing states."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

from scaleray.images import ImageClassification

REFUSED = "in mode F, with values from .*8 or 16 bits"


class Workload(ImageClassification):
    def __init__(self):
        super().__init__(data={"train": "images"}, size=4, channels=1, crop=None, flip=False)

    @staticmethod
    def prepare():
        draw = np.random.default_rng(0)
        for number in range(16):
            path = Path("images", "ab"[number % 2], f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            values = draw.random((6, 6), dtype=np.float32)
            Image.fromarray(values).save(path.with_suffix(".tif"))

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
