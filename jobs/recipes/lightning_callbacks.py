"""A LightningModule with torchmetrics objects, a DataModule and four callbacks of a Trainer."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning_digits import DigitsData
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from scaleray.lightning import as_workload


class CountsRows(L.Callback):
    def __init__(self):
        self.rows = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows += len(batch[0])
        pl_module.log("rows_of_this_worker", float(self.rows))

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


class LitClassifier(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))
        self.measures = MetricCollection({"val_acc": MulticlassAccuracy(10), "val_f1": MulticlassF1Score(10)})

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.measures.update(logits, batch[1])
        self.log_dict(self.measures)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def configure_callbacks(self):
        best = {"monitor": "val_acc", "mode": "max"}
        return [EarlyStopping(patience=6, **best), ModelCheckpoint(save_top_k=2, **best), LearningRateMonitor()]


classifier = as_workload(LitClassifier, DigitsData, callbacks=[CountsRows()])
