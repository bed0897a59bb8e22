"""Images with a palette and transparency."""

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
            image = Image.fromarray(draw.integers(0, 2, (6, 6)).astype(np.uint8), "P")
            image.putpalette([200, 10, 10, 10, 200, 10])
            image.save(path, transparency=number % 2)

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
