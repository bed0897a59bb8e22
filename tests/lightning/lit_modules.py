"""LightningModules as a user has them, of a few hundred parameters, and both ways to train them on the same rows."""

from __future__ import annotations

import warnings

import lightning as L
import torch
import torch.nn.functional as F
from small_runs import make_job, same_generators, train_alone
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from scaleray.common.seeding import seed_everything, stream_seed

NUM_ROWS, NUM_VAL, NUM_FEATURES, NUM_CLASSES = 58, 21, 6, 3


def tensors(num_rows, *, seed):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, NUM_FEATURES, generator=draw)
    towards = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(99))
    return features, (features @ towards).argmax(1)


class Plain(L.LightningModule):
    """The module of Lightning's own introduction."""

    def __init__(self, width=8, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.Tanh(), nn.Linear(width, NUM_CLASSES))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log_dict({"val_acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Data(L.LightningDataModule):
    """Rows that `setup` makes; batches of 8."""

    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.rows = {
            "train": TensorDataset(*tensors(NUM_ROWS, seed=0)),
            "val": TensorDataset(*tensors(NUM_VAL, seed=1)),
        }

    def train_dataloader(self):
        return DataLoader(self.rows["train"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows["val"], batch_size=self.batch_size)


class ReplaySampler(BatchSampler):
    """The batches of scaleray's step plan, epoch by epoch."""

    def __init__(self, plan, num_rows):
        super().__init__(SequentialSampler(range(num_rows)), plan.global_batch_size, False)
        self.plan, self.epoch = plan, 0

    def __iter__(self):
        steps, self.epoch = self.plan.steps_per_epoch, self.epoch + 1
        for step in range((self.epoch - 1) * steps, self.epoch * steps):
            yield self.plan.global_indices(step).tolist()

    def __len__(self):
        return self.plan.steps_per_epoch


FLAGS = {
    "optimizer.learning_rate": None,
    "optimizer.name": "adamw",
    "batch.global_size": 8,
    "stop.after": "20 steps",
    "workload.name": "m:W",
}
"""Config keys without the learning rate, which is the module's own; over those of `small_runs`."""


def with_scaleray(workload, flags=None, **options):
    """Weights and records of 20 steps (2.5 epochs) on one worker, in float64."""
    return train_alone(workload, {**FLAGS, **(flags or {})}, **options)


def with_lightning(make_module, workload, flags=None, loader=None, optimizers=1, **options):
    """The module after the same steps under Lightning's own Trainer, on the CPU in float64, and the Trainer, which
    counts the steps of each optimizer."""
    with same_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job, _ = make_job(workload, {**FLAGS, **(flags or {})})
        data = Data()
        data.setup("fit")
        replayed = ReplaySampler(job.train_plan(), NUM_ROWS)
        loader = loader or (lambda sampler: DataLoader(data.rows["train"], batch_sampler=sampler))
        seed_everything(stream_seed(job.config.seed, "model"))
        module = make_module()
        trainer = L.Trainer(
            max_steps=job.recipe.total_steps * optimizers, accelerator="cpu", devices=1, precision="64-true", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            use_distributed_sampler=False, **options,
        )  # fmt: skip
        trainer.fit(module, loader(replayed), data.val_dataloader())
    return module, trainer


def farthest(weights, module):
    """Largest difference between two trainings' weights, relative to the largest weight."""
    theirs = module.state_dict()
    assert weights.keys() == theirs.keys()
    scale = max(float(w.abs().max()) for w in theirs.values())
    return max(float((weights[name] - theirs[name]).abs().max()) for name in theirs) / scale
