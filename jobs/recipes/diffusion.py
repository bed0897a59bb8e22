"""A diffusion model that draws the digit it is asked for, on scikit-learn's digits: it is the average of its weights
that draws. A digit counts as drawn where the nearest real one has its label."""

import numpy as np
import torch
import torch.nn.functional as F
from gan import digits
from torch import nn

STEPS = 50
KEPT = np.cumprod(1 - np.linspace(1e-3, 0.2, STEPS)).astype(np.float32)  # of the image, after each step of noise


class Denoiser(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        inner = [nn.Linear(width, width), nn.SiLU()]
        self.layers = nn.Sequential(nn.Linear(64 + 10 + STEPS, width), nn.SiLU(), *inner, *inner, nn.Linear(width, 64))

    def forward(self, x, label, step):
        return self.layers(torch.cat([x, F.one_hot(label, 10), F.one_hot(step, STEPS)], 1))


class Diffusion:
    def build_model(self):
        return Denoiser()

    def datasets(self):
        x, y = digits()
        return {"train": {"x": x, "y": y}, "val": {"x": x[:300], "y": y[:300]}}

    def transform(self, rows, rng):
        return {**rows, "noise": rng.normal((64,)).astype(np.float32), "step": rng.integers(STEPS)}

    def loss(self, model, batch):
        kept = torch.from_numpy(KEPT).to(batch["x"])[batch["step"]][:, None]
        noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        return (model(noisy, batch["y"], batch["step"]) - batch["noise"]).square().sum() / 64, len(noisy)

    def evaluate(self, model, batches, *, split, rank, world_size):
        x, y = map(torch.from_numpy, digits())
        hits, count = torch.zeros(()), 0
        for batch in batches:
            drawn, labels, kept = batch["noise"], batch["y"], torch.from_numpy(KEPT).to(batch["x"])
            for step in reversed(range(STEPS)):  # without noise of its own (DDIM), so that it repeats itself
                noise = model(drawn, labels, torch.full_like(labels, step))
                image = ((drawn - (1 - kept[step]).sqrt() * noise) / kept[step].sqrt()).clamp(-1, 1)
                noise = (drawn - kept[step].sqrt() * image) / (1 - kept[step]).sqrt()
                drawn = kept[step - 1].sqrt() * image + (1 - kept[step - 1]).sqrt() * noise if step else image
            hits, count = (
                hits + (y[torch.cdist(drawn.float().cpu(), x).argmin(1)] == labels.cpu()).sum(),
                count + len(drawn),
            )
        return {"as_asked": (hits, count)}
