"""A workload on folders of images with a network of a few weights, for runs that import it by its file."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import nn

from scaleray.images import ImageClassification


class Small(ImageClassification):
    """A network of a few weights in place of one by name."""

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4), nn.Tanh(), nn.Linear(4, 2))


def write_images(folder, number):
    """Images of two classes, dark and light, each with its own gradient from left to right."""
    for n in range(number):
        path = folder / ["cat", "dog"][n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = (np.linspace(8 * (n % 7), 60, 12) + 150 * (n % 2)).astype(np.uint8)
        Image.fromarray(np.broadcast_to(row, (10, 12)).copy()).save(path)
    return folder
