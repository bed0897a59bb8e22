"""A GAN that draws the digit it is asked for, on scikit-learn's digits; a digit counts as drawn where the nearest real
one has its label."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


@functools.cache
def digits():
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 8 - 1).astype(np.float32), labels


def mlp(num_in, width, num_out):
    layers = nn.Linear(num_in + 10, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Linear(width, num_out))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(16, 128, 64), mlp(64, 128, 1)


class Gan:
    def build_model(self):
        return Pair()

    def datasets(self):
        x, y = digits()
        noise = np.random.default_rng(0).normal(size=(len(x), 16)).astype(np.float32)
        return {"train": {"x": x, "y": y, "z": noise}, "val": {"y": y[:500], "z": noise[::-1][:500].copy()}}

    def optimizer(self, model, settings):
        adam = lambda part: torch.optim.Adam(part.parameters(), settings.learning_rate, betas=(0.5, 0.999))
        return {"discriminator": adam(model.discriminator), "generator": adam(model.generator)}

    def losses(self):
        return {"discriminator": self.discriminate, "generator": self.generate}

    def drawn(self, model, batch):
        return torch.tanh(model.generator(torch.cat([batch["z"], F.one_hot(batch["y"], 10)], 1)))

    def judged(self, model, images, batch):
        return model.discriminator(torch.cat([images, F.one_hot(batch["y"], 10)], 1))

    def discriminate(self, model, batch):
        real, fake = batch["x"], self.drawn(model, batch).detach()
        return (F.softplus(-self.judged(model, real, batch)) + F.softplus(self.judged(model, fake, batch))).sum(), len(
            real
        )

    def generate(self, model, batch):
        return F.softplus(-self.judged(model, self.drawn(model, batch), batch)).sum(), len(batch["z"])

    def metrics(self, model, batch):
        drawn, (x, y) = self.drawn(model, batch).float(), digits()
        nearest = torch.cdist(drawn, torch.from_numpy(x).to(drawn.device)).argmin(1).cpu()
        return {"as_asked": ((torch.from_numpy(y)[nearest] == batch["y"].cpu()).sum(), len(drawn))}
