"""What cannot run here is refused by name, with the file and line of the user's own."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lit_modules import Data, Plain, tensors, with_scaleray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from scaleray.errors import DataError, ScaleRayError
from scaleray.lightning import as_workload
from scaleray.lightning.hooks_refused import REFUSED_OF_MODULE


def refused(call):
    with pytest.raises(ScaleRayError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("hook", REFUSED_OF_MODULE)
def test_a_hook_that_would_change_the_step_is_refused_with_its_line(hook):
    own = type("Own", (Plain,), {hook: lambda self, *args: None})
    message = refused(lambda: as_workload(own, Data))
    assert f"defines its own {hook}()" in message and f"{__file__}:" in message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.nn.Linear, Data), "it must be a LightningModule"),
        ((L.LightningModule, Data), "lacks training_step"),
        ((Plain, TensorDataset), "it must be a LightningDataModule, or a function"),
        ((Plain, 3), "it must be a LightningDataModule, or a function"),
    ],
)
def test_what_is_no_lightning_is_refused(given, words):
    assert words in refused(lambda: as_workload(*given))


def test_a_module_that_asks_its_trainer_for_more_is_shown_the_line():
    class Asks(Plain):
        def training_step(self, batch, batch_idx):
            if self.trainer.is_last_batch:
                return None
            return super().training_step(batch, batch_idx)

    message = refused(lambda: with_scaleray(as_workload(Asks, Data)()))
    assert "self.trainer.is_last_batch is used in" in message and f"{__file__}:" in message
    assert "if self.trainer.is_last_batch:" in message and "global_step" in message


def test_arguments_that_nobody_takes_are_refused_with_those_there_are():
    from scaleray.workload import build_workload

    factory = as_workload(Plain, Data)
    message = refused(lambda: build_workload(factory, {"depth": 3}, name="it.py:W"))
    assert "unexpected keyword argument 'depth'" in message and "batch_size=8" in message and "width=8" in message
    assert build_workload(factory, {"width": 5, "batch_size": 4}, name="W").build_model().net[0].out_features == 5


def loaded(loader):
    return lambda: as_workload(Plain, lambda: {"train": loader})().datasets()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


ROWS = TensorDataset(*tensors(8, seed=0))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Endless(), batch_size=None), "without batches"),
        ([DataLoader(Endless()), DataLoader(ROWS)], "one of them over an IterableDataset (Endless)"),
        (DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 8, 8)), "the sampler WeightedRandomSampler"),
        (DataLoader(ROWS, batch_size=None), "without batches"),
        (
            DataLoader(ROWS, batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(ROWS), 2, False)),
            "with Mine",
        ),
        ([DataLoader(ROWS, 2), DataLoader(ROWS, 4)], "batches of 2, 4 rows"),
        (iter([]), "must be a torch DataLoader"),
        ({}, "it must return a DataLoader"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_loader_whose_rows_cannot_be_read_by_index_is_refused_by_name(loader, words):
    with pytest.raises(DataError) as caught:
        loaded(loader)()
    assert words in str(caught.value)


class OverTokens(Plain):
    """A mean over what is real, of which every row has another number."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        real = x[:, 0] > 0
        return losses[real].mean()


def test_a_loss_that_is_no_mean_over_rows_is_found_at_the_first_batch_and_a_count_makes_it_exact():
    message = refused(lambda: with_scaleray(as_workload(OverTokens, Data)()))
    assert "returns a loss that is not a mean over rows" in message and "count=lambda batch" in message
    assert f"OverTokens in {__file__}:" in message
    counted = as_workload(OverTokens, Data, count=lambda batch: (batch[0][:, 0] > 0).sum())
    assert len(with_scaleray(counted()).steps) == 20
    assert len(with_scaleray(as_workload(OverTokens, Data, count="rows")()).steps) == 20
    wrong = as_workload(Plain, Data, count=lambda batch: (batch[0][:, 0] > 0).sum())
    assert "not a mean over the count" in refused(lambda: with_scaleray(wrong()))


def test_a_step_without_a_loss_is_refused():
    class Skips(Plain):
        def training_step(self, batch, batch_idx):
            return None

    assert "training_step() returned 'NoneType'" in refused(lambda: with_scaleray(as_workload(Skips, Data)()))


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda self, adam: [adam, adam], "2 optimizers"),
        (
            lambda self, adam: {"optimizer": adam, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(adam)},
            "monitor",
        ),
        (lambda self, adam: {"optimizer": adam, "lr_scheduler": {"scheduler": 3}}, "is int"),
        (lambda self, adam: {"lr_scheduler": 3}, "it needs 'optimizer'"),
        (lambda self, adam: "adam", "it must return an optimizer, [optimizer]"),
        (
            lambda self, adam: [[adam], [{"scheduler": torch.optim.lr_scheduler.StepLR(adam, 1), "interval": "batch"}]],
            "'step' or 'epoch'",
        ),
        (
            lambda self, adam: [
                [adam],
                [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=9), "interval": "step"}],
            ],
            "estimated_stepping_batches",
        ),
    ],
)
def test_what_configure_optimizers_must_not_return_is_said(configure, words):
    class Own(Plain):
        def configure_optimizers(self):
            return configure(self, torch.optim.Adam(self.parameters(), lr=0.1))

    assert words in refused(lambda: with_scaleray(as_workload(Own, Data)()))


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda self: self.log("val_worst", torch.ones(()), reduce_fx="max"), "reduce_fx=max of self.log('val_worst')"),
        (lambda self: self.log("val_all", torch.ones(3)), "self.log('val_all') of a tensor of shape [3]"),
        (lambda self: self.log("val_name", "best"), "self.log('val_name')"),
    ],
)
def test_what_cannot_be_logged_is_said_with_its_line(log, words):
    class Logs(Plain):
        def validation_step(self, batch, batch_idx):
            log(self)

    message = refused(lambda: with_scaleray(as_workload(Logs, Data)()))
    assert words in message and f"{__file__}:" in message
