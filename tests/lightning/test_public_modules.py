"""Modules as projects publish them: they train here as under Lightning, and on two workers as on one."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lit_modules import FLAGS, NUM_FEATURES, Data, farthest, with_lightning, with_scaleray
from small_runs import train
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from scaleray.lightning import as_workload


class AutoEncoder(L.LightningModule):
    """An encoder and a decoder, with several values logged at once."""

    def __init__(self, hidden: int = 5, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.decoder = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, NUM_FEATURES))
        self.example_input_array = torch.zeros(1, NUM_FEATURES)

    def forward(self, x):
        return self.encoder(x)

    def _shared_step(self, batch, stage):
        x, _ = batch
        z = self.encoder(x)
        reconstruction = F.mse_loss(self.decoder(z), x)
        penalty = 1e-2 * z.abs().mean()
        values = {
            f"{stage}/reconstruction": reconstruction,
            f"{stage}/penalty": penalty,
            f"{stage}/loss": reconstruction + penalty,
        }
        self.log_dict(values, on_step=stage == "train", on_epoch=True, prog_bar=True, batch_size=len(x))
        return reconstruction + penalty

    def training_step(self, batch, batch_idx):
        return self._shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-4)


WORDS = ["the good film", "a bad one", "good", "bad bad film here", "the film was good here", "one bad"]


class Reviews(L.LightningDataModule):
    """Texts that the collation makes tokens of, each batch as long as its longest."""

    def setup(self, stage=None):
        names = sorted({word for text in WORDS for word in text.split()})
        self.vocabulary = {word: number + 1 for number, word in enumerate(names)}
        self.rows = [{"text": WORDS[i % 6], "label": int("good" in WORDS[i % 6])} for i in range(58)]

    def _collate(self, rows):
        tokens = [torch.tensor([self.vocabulary[word] for word in row["text"].split()]) for row in rows]
        padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        return {"tokens": padded, "mask": padded > 0, "labels": torch.tensor([row["label"] for row in rows])}

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8, shuffle=True, collate_fn=self._collate)

    def val_dataloader(self):
        return DataLoader(self.rows[:20], batch_size=8, collate_fn=self._collate)


class TextClassifier(L.LightningModule):
    """Mean of embeddings, a linear layer and OneCycleLR over the whole training."""

    def __init__(self, width: int = 4, max_lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.head = nn.Embedding(32, width, padding_idx=0), nn.Linear(width, 2)

    def forward(self, tokens, mask):
        embedded = self.embedding(tokens) * mask.unsqueeze(-1)
        return self.head(embedded.sum(1) / mask.sum(1, keepdim=True))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["tokens"], batch["mask"]), batch["labels"])
        self.log("train_loss", loss)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch["tokens"], batch["mask"])
        self.log("val_loss", F.cross_entropy(logits, batch["labels"]))
        self.log("val_acc", (logits.argmax(-1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr)
        scheduler = OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def reviews(sampler):
    data = Reviews()
    data.setup("fit")
    return DataLoader(data.rows, batch_sampler=sampler, collate_fn=data._collate)


def trained(place, made_of, data):
    finished = train(place, as_workload(made_of, data)(), FLAGS)
    return finished.weights, finished.evaluations[-1].metrics if finished.evaluations else {}


@pytest.mark.parametrize(("made_of", "data"), [(AutoEncoder, Data), (TextClassifier, Reviews)])
def test_a_published_module_trains_as_under_lightning_and_on_two_workers(gloo, made_of, data):
    workload = as_workload(made_of, data)()
    ours = with_scaleray(workload)
    loader = reviews if data is Reviews else None
    theirs, _ = with_lightning(made_of, workload, loader=loader, **({"limit_val_batches": 0} if loader else {}))
    assert farthest(ours.weights, theirs) < 1e-12
    weights, metrics = gloo.run(2, trained, made_of, data)[0]
    assert all(torch.allclose(weights[name], ours.weights[name], rtol=1e-9, atol=1e-12) for name in weights)
    assert metrics == pytest.approx(ours.evaluations[-1].metrics)
    assert {"val/loss", "val/acc"} <= metrics.keys() or metrics.keys() == {
        "val/loss",
        "val/penalty",
        "val/reconstruction",
    }
