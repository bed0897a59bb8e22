"""Hooks, logged values and schedulers that follow them: called, weighted and stepped as by Lightning's own Trainer."""

import pytest
import torch
from lit_modules import Data, Plain, farthest, with_lightning, with_scaleray
from small_runs import train
from torch.optim.lr_scheduler import ReduceLROnPlateau

from scaleray.errors import WorkloadError
from scaleray.lightning import as_workload
from scaleray.records.run_record import LoggedMetrics

TWO_EPOCHS = {"stop.after": "16 steps", "evaluation.every": "1 epoch"}
HOOKS = [
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip
BATCH_HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"]


def noting(name):
    def hook(self, *args):
        batch = next((arg for arg in args if isinstance(arg, list)), None)
        numbers = [arg for arg in args if isinstance(arg, int)]
        rows = None if batch is None else len(batch[0])
        self.calls.append((name, self.current_epoch, self.global_step, rows, numbers))

    return hook


class Diary(Plain):
    """Writes down every hook, with what the module knows of the training then."""

    calls = None

    def training_step(self, batch, batch_idx):
        if self.calls is not None:
            self.calls.append(("step", self.current_epoch, self.global_step, len(batch[0]), [batch_idx]))
        return super().training_step(batch, batch_idx)


for each in (*HOOKS, *BATCH_HOOKS):
    setattr(Diary, each, noting(each))


def test_hooks_are_called_in_lightnings_order_with_what_it_passes():
    ours, theirs = [], []

    class Ours(Diary):
        def on_fit_start(self):
            self.calls = ours
            super().on_fit_start()

    class Theirs(Diary):
        calls = theirs

    workload = as_workload(Ours, Data)()
    with_scaleray(workload, {**TWO_EPOCHS, "evaluation.micro_size": 8})
    with_lightning(Theirs, workload, TWO_EPOCHS)
    assert len(theirs) > 60
    # a validation batch has no place in its epoch here
    without_place = lambda calls: [call[:4] if "validation" in call[0] else call for call in calls]
    assert without_place(ours) == without_place(theirs)


class Plateau(Plain):
    monitor = "val_loss"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": self.monitor}


class OfTraining(Plateau):
    monitor = "train_loss_epoch"


@pytest.mark.parametrize("made_of", [Plateau, OfTraining])
def test_a_scheduler_that_follows_a_value_is_stepped_as_by_lightning(made_of):
    flags = {"stop.after": "28 steps", "evaluation.every": "1 epoch"}
    workload = as_workload(made_of, Data)()
    ours = with_scaleray(workload, flags)
    theirs, trainer = with_lightning(made_of, workload, flags)
    assert ours.steps[-1].learning_rate == trainer.optimizers[0].param_groups[0]["lr"] < 0.2
    assert farthest(ours.weights, theirs) < 1e-12


def test_a_scheduler_whose_value_is_never_measured_says_so_and_one_that_nothing_logs_is_refused():
    finished = with_scaleray(as_workload(Plateau, Data)())
    assert len([event for event in finished.events if "val_loss was never measured" in event]) == 1
    unknown = type("Unknown", (Plateau,), {"monitor": "val_los"})
    with pytest.raises(WorkloadError, match=r"the monitor of ReduceLROnPlateau is 'val_los'.*train_loss"):
        with_scaleray(as_workload(unknown, Data)(), TWO_EPOCHS)


def test_means_over_an_epoch_are_those_of_lightning():
    workload = as_workload(Plain, Data)()
    ours = with_scaleray(workload, TWO_EPOCHS)
    _, trainer = with_lightning(Plain, workload, TWO_EPOCHS)
    (last,) = [m for m in ours.messages if isinstance(m, LoggedMetrics) and m.step == 16]
    assert last.metrics == {
        "train/loss_epoch": pytest.approx(float(trainer.callback_metrics["train_loss_epoch"]), rel=1e-6)
    }


class LogsSteps(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_half", loss / 2)
        return loss


def test_what_is_logged_by_steps_stands_beside_the_step():
    finished = with_scaleray(as_workload(LogsSteps, Data)())
    assert all(step.more["train/half"] == pytest.approx(step.loss / 2) for step in finished.steps)


class Outputs(Plain):
    """Keeps what validation steps give, and logs what it makes of them at the end."""

    def on_validation_epoch_start(self):
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.outputs.append(self(batch[0]).argmax(1))

    def on_validation_epoch_end(self):
        self.log("val_ones", (torch.cat(self.outputs) == 1).double().mean())


def test_values_logged_at_the_end_of_a_validation_are_recorded():
    finished = with_scaleray(as_workload(Outputs, Data)(), TWO_EPOCHS)
    found = [
        m.metrics["val/ones"] for m in finished.messages if isinstance(m, LoggedMetrics) and "val/ones" in m.metrics
    ]
    assert len(found) == 2 and all(0 <= value <= 1 for value in found)


def trained(place, flags, folder=None, kill_at=None):
    from lit_modules import FLAGS

    finished = train(place, as_workload(Plateau, Data)(), {**FLAGS, **flags}, folder=folder, kill_at=kill_at)
    logged = {
        (m.step, name): value
        for m in finished.messages
        if isinstance(m, LoggedMetrics)
        for name, value in m.metrics.items()
    }
    return finished.weights, [step.learning_rate for step in finished.steps], logged


@pytest.mark.combination
def test_on_several_workers_values_are_those_of_one(gloo):
    flags = {"stop.after": "28 steps", "evaluation.every": "1 epoch"}
    (weights, rates, logged), *_ = gloo.run(1, trained, flags)
    (others, other_rates, other_logged), *rest = gloo.run(2, trained, flags)
    assert rates == pytest.approx(other_rates) and logged == pytest.approx(other_logged) and len(logged) == 4
    assert all(torch.allclose(weights[name], others[name], rtol=1e-10) for name in weights)
    assert rest[0][2] == {}  # rank 0 tells


@pytest.mark.combination
def test_an_interrupted_training_goes_on_to_the_bit(gloo, tmp_path):
    flags = {
        "stop.after": "28 steps",
        "evaluation.every": "1 epoch",
        "checkpoint.every": "5 steps",
        "deterministic": True,
    }
    (weights, rates, logged), *_ = gloo.run(2, trained, flags, tmp_path / "whole")
    gloo.run(2, trained, flags, tmp_path / "run", 12)
    (again, _, logged_again), *_ = gloo.run(2, trained, flags, tmp_path / "run")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert rates[-1] < rates[0]
    assert {key: value for key, value in logged.items() if key[0] > 10} == pytest.approx(logged_again)


def test_a_training_that_is_resumed_after_its_end_has_nothing_left_to_do(tmp_path):
    flags = {**TWO_EPOCHS, "checkpoint.every": "8 steps"}
    first = with_scaleray(as_workload(Plateau, Data)(), flags, folder=tmp_path)
    again = with_scaleray(as_workload(Plateau, Data)(), flags, folder=tmp_path)
    assert again.steps == [] and all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)
