"""Training a LightningModule here gives what Lightning's own Trainer gives on the same rows in the same order."""

import pytest
import torch
from lit_modules import Data, Plain, farthest, with_lightning, with_scaleray
from torch.optim import lr_scheduler

from scaleray.lightning import as_workload

ROUNDING = 1e-12  # float64, sums in another order; 20 steps of a chaotic system multiply it by ten or so


class EveryStep(Plain):
    """A rate that follows the length of the training."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        one_cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one_cycle, "interval": "step"}}


class EveryEpoch(Plain):
    """Schedulers in two lists, as of old: stepped by epochs."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class EveryThirdStep(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(
            [{"params": self.net[0].parameters(), "lr": 0.01}, {"params": self.net[2].parameters()}], lr=0.1
        )
        warm = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return ([optimizer], [{"scheduler": warm, "interval": "step", "frequency": 3}])


class OneAfterAnother(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=15),
        ]
        both = lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
        return [{"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}]


class InADict(Plain):
    """training_step returns a dict, and takes the batch alone; the optimizer stands in a list."""

    def training_step(self, batch):
        x, y = batch
        return {"loss": torch.nn.functional.cross_entropy(self(x), y), "logits": x}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.3)]


@pytest.mark.combination
@pytest.mark.parametrize("made_of", [Plain, EveryStep, EveryEpoch, EveryThirdStep, OneAfterAnother, InADict])
def test_twenty_steps_are_those_of_lightnings_own_trainer(made_of):
    workload = as_workload(made_of, Data)()
    ours = with_scaleray(workload)
    theirs, trainer = with_lightning(made_of, workload)
    assert farthest(ours.weights, theirs) < ROUNDING
    assert trainer.global_step == len(ours.steps) == 20
    now = ours.evaluations[-1].metrics
    (reference,) = trainer.validate(theirs, Data(), verbose=False)
    assert now["val/loss"] == pytest.approx(reference["val_loss"], rel=1e-6)  # Lightning adds up in float32
    assert now["val/acc"] == pytest.approx(reference["val_acc"], rel=1e-6)
