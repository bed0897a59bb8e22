"""Grey images of 16 bits."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

from scaleray.images import ImageClassification


class Workload(ImageClassification):
    def __init__(self):
        super().__init__(data={"train": "images"}, size=4, channels=1, crop=None, flip=False)

    @staticmethod
    def prepare():
        draw = np.random.default_rng(0)
        for number in range(16):
            path = Path("images", "ab"[number % 2], f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            values = 8000 + 32000 * (number % 2) + draw.integers(0, 3000, (6, 6))
            Image.fromarray(values.astype(np.uint16)).save(path)

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
