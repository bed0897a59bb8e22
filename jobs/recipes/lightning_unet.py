"""A U-Net as a LightningModule: the strokes of scikit-learn's digits are found in noisy images."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryJaccardIndex

from scaleray.lightning import as_workload


def loaders():
    images = torch.tensor(load_digits().images / 16).float()[:, None]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(images + 0.4 * noise, (images > 0.5).float())
    train, val = random_split(rows, [1437, 360], torch.Generator().manual_seed(0))
    return {"train": DataLoader(train, 32, shuffle=True), "val": DataLoader(val, 360)}


def block(num_in, num_out):
    layers = nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.Conv2d(num_out, num_out, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers)


class LitUNet(L.LightningModule):
    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.down, self.deep = block(1, width), block(width, 2 * width)
        self.up, self.join = nn.ConvTranspose2d(2 * width, width, 2, stride=2), block(2 * width, width)
        self.head, self.iou = nn.Conv2d(width, 1, 1), BinaryJaccardIndex()

    def forward(self, images):
        shallow = self.down(images)
        deep = self.up(self.deep(F.max_pool2d(shallow, 2)))
        return self.head(self.join(torch.cat([shallow, deep], 1)))

    def training_step(self, batch, batch_idx):
        logits, masks = self(batch[0]), batch[1]
        overlap = 2 * (logits.sigmoid() * masks).sum((1, 2, 3)) / (logits.sigmoid() + masks).sum((1, 2, 3))
        loss = F.binary_cross_entropy_with_logits(logits, masks) + (1 - overlap).mean()  # Dice of each image
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.iou(self(batch[0]).sigmoid(), batch[1].int())
        self.log("val_iou", self.iou)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


unet = as_workload(LitUNet, loaders)
