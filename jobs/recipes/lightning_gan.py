"""A GAN as a LightningModule with manual optimisation, which draws the digit that it is asked for; a digit counts as
drawn where the nearest real one has its label."""

import lightning as L
import torch
import torch.nn.functional as F
from gan import digits, mlp
from torch.utils.data import DataLoader, TensorDataset

from scaleray.lightning import as_workload


def loaders():
    x, y = map(torch.from_numpy, digits())
    rows = TensorDataset(x, y, torch.randn(len(x), 16, generator=torch.Generator().manual_seed(0)))
    held = TensorDataset(*(column[:500].flip(0) for column in rows.tensors))
    return {"train": DataLoader(rows, 64, shuffle=True), "val": DataLoader(held, 500)}


class LitGan(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.automatic_optimization, self.lr = False, lr
        self.G, self.D = mlp(16, 128, 64), mlp(64, 128, 1)

    def draw(self, z, y):
        return torch.tanh(self.G(torch.cat([z, F.one_hot(y, 10)], 1)))

    def judge(self, x, y):
        return self.D(torch.cat([x, F.one_hot(y, 10)], 1))

    def training_step(self, batch, batch_idx):
        (x, y, z), (g_opt, d_opt) = batch, self.optimizers()
        drawn = self.draw(z, y)
        d_loss = (F.softplus(-self.judge(x, y)) + F.softplus(self.judge(drawn.detach(), y))).mean()
        self.update(d_opt, d_loss)
        g_loss = F.softplus(-self.judge(drawn, y)).mean()
        self.update(g_opt, g_loss)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def update(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        (_, y, z), (real, labels) = batch, map(torch.from_numpy, digits())
        nearest = torch.cdist(self.draw(z, y).float().cpu(), real).argmin(1)
        self.log("val_as_asked", (labels[nearest] == y.cpu()).float().mean())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), self.lr, betas=(0.5, 0.999)) for part in (self.G, self.D)]


gan = as_workload(LitGan, loaders)
