"""A U-Net with a Dice loss over the whole batch: the ink of handwritten digits under noise.

scaleray train -c jobs/recipes/unet_dice.yaml
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from scaleray import Workload


def layer(size_in, size_out):
    return nn.Sequential(nn.Conv2d(size_in, size_out, 3, padding=1), nn.GroupNorm(4, size_out), nn.GELU())


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down, self.deep, self.up = layer(1, width), layer(width, 2 * width), layer(3 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        high = self.down(x)
        low = nn.functional.interpolate(self.deep(nn.functional.max_pool2d(high, 2)), scale_factor=2)
        return self.last(self.up(torch.cat([high, low], dim=1)))


class Ink(Workload):
    def build_model(self):
        return UNet()

    def datasets(self):
        images = load_digits().images.astype("float32")[:, None] / 16
        parts = {"train": images[:1440], "val": images[1440:]}
        return {name: {"image": part, "mask": (part > 0.5).astype("float32")} for name, part in parts.items()}

    def transform(self, rows, rng):
        noise = rng.normal(64).reshape(rows["image"].shape)
        return {**rows, "image": (rows["image"] + noise).astype("float32")}

    def outputs(self, model, batch):
        return {"ink": model(batch["image"]).sigmoid(), "mask": batch["mask"]}

    def batch_loss(self, outputs):
        ink, mask = outputs["ink"], outputs["mask"]
        return 1 - 2 * (ink * mask).sum() / (ink.sum() + mask.sum()), 1
