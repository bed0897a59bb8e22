"""Lightning's callbacks: translated into settings, called at their hooks, or refused by name before anything starts."""

from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lit_modules import FLAGS, Data, Plain, with_lightning, with_scaleray
from small_runs import train

import scaleray
from scaleray.config import load_config
from scaleray.config.brought import with_brought
from scaleray.errors import ConfigError, ScaleRayError, WorkloadError
from scaleray.lightning import as_workload
from scaleray.lightning.trainer_callbacks import HOOKS, LEFT_OUT, REFUSED, REFUSED_HOOKS, TRANSLATED
from scaleray.records.run_record import LoggedMetrics

TWO_EPOCHS = {"stop.after": "16 steps", "evaluation.every": "1 epoch"}


def settled(callbacks, flags=None, module=Plain):
    """The config with what the callbacks of a workload bring."""
    config = load_config(flags={**FLAGS, **(flags or {})}, environ={})
    return with_brought(config, as_workload(module, Data, callbacks=callbacks)())


def test_early_stopping_becomes_the_patience_of_the_config():
    config = settled([EarlyStopping("val_loss", patience=5)])
    assert (config.stop.patience, config.stop.watch, str(config.evaluation.every)) == (5, "val/loss min", "1 epoch")
    config = settled([EarlyStopping("val_acc", mode="max", stopping_threshold=0.9)], {"evaluation.every": "3 steps"})
    assert (config.stop.watch, str(config.stop.at)) == ("val/acc max", "val/acc >= 0.9")
    assert str(config.evaluation.every) == "3 steps"


@pytest.mark.parametrize(
    ("callback", "values"),
    [
        (ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=3),
         {"best": "val/acc max", "keep_best": 3, "every": None}),
        (ModelCheckpoint(), {"best": None, "every": "1 epoch", "keep_best": 1}),
        (ModelCheckpoint(every_n_train_steps=50), {"every": "50 steps"}),
        (ModelCheckpoint(every_n_epochs=2, save_top_k=-1), {"every": "2 epochs", "keep_every": "2 epochs"}),
        (ModelCheckpoint(train_time_interval=timedelta(minutes=3)), {"every_minutes": 3.0, "every": None}),
        (ModelCheckpoint(save_top_k=0), {"best": None, "every": None}),
        (ModelCheckpoint(monitor="val_loss/dataloader_idx_1"), {"best": "val_1/loss min"}),
        (LearningRateMonitor(logging_interval="step"), {"every": None}),
    ],
)  # fmt: skip
def test_a_checkpoint_callback_becomes_the_checkpoints_of_the_config(callback, values):
    checkpoint = settled([callback]).checkpoint
    found = {key: getattr(checkpoint, key) for key in values}
    assert {k: v if v is None or isinstance(v, (int, float)) else str(v) for k, v in found.items()} == values


def test_accumulation_becomes_micro_batches():
    callback = GradientAccumulationScheduler({0: 4})
    assert settled([callback]).batch.micro_size == 2
    assert settled([callback], {"scale.workers": 2}).batch.micro_size == 1
    assert settled([GradientAccumulationScheduler({0: 1})]).batch.micro_size is None


def test_a_value_in_the_config_that_contradicts_a_callback_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"stop\.patience is '?7'?: EarlyStopping of the workload sets 3"):
        settled([EarlyStopping("val_loss")], {"stop.patience": 7, "stop.watch": "val/loss min", **TWO_EPOCHS})
    same = {"stop.patience": 3, "stop.watch": "val/loss min", **TWO_EPOCHS}
    assert settled([EarlyStopping("val_loss")], same).stop.patience == 3
    with pytest.raises(WorkloadError, match=r"stop\.watch of EarlyStopping is val/acc min: EarlyStopping sets"):
        settled([EarlyStopping("val_loss"), EarlyStopping("val_acc")])


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (EarlyStopping("val_loss", min_delta=0.1), "min_delta of EarlyStopping"),
        (EarlyStopping("val_loss", divergence_threshold=9.0), "divergence_threshold of EarlyStopping is 9"),
        (LearningRateMonitor(log_momentum=True), "log_momentum of LearningRateMonitor"),
        (lightnings.StochasticWeightAveraging(0.1), "StochasticWeightAveraging is not supported.*averaging.decay"),
        (lightnings.Timer("00:12:00:00"), "the callback Timer is not supported.*use stop.after"),
        (EarlyStopping, "is 'EarlyStopping': it must be a Lightning Callback"),
        (type("Mine", (EarlyStopping,), {})("val_loss"), "derives from EarlyStopping"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_has_no_equivalent_is_refused_when_the_workload_is_made(callback, words):
    with pytest.raises(ScaleRayError, match=f"(?s){words}"):
        as_workload(Plain, Data, callbacks=[callback])


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (GradientAccumulationScheduler({0: 1, 4: 2}), "scheduling of GradientAccumulationScheduler"),
        (EarlyStopping("train_loss"), "monitor of EarlyStopping is 'train_loss': it must be logged in validation"),
        (ModelCheckpoint(monitor="val_loss", every_n_train_steps=9), "every_n_train_steps of ModelCheckpoint is 9"),
        (ModelCheckpoint(save_top_k=-1, train_time_interval=timedelta(minutes=3)), "save_top_k of ModelCheckpoint"),
    ],
)
def test_values_that_cannot_be_settings_are_refused_before_anything_starts(callback, words):
    with pytest.raises(ScaleRayError, match=words):
        settled([callback])


@pytest.mark.parametrize("hook", REFUSED_HOOKS)
def test_a_hook_without_a_place_is_refused_with_its_line(hook):
    own = type("Own", (L.Callback,), {hook: lambda self, *args: None})
    with pytest.raises(WorkloadError, match=rf"defines {hook}\(\), which is not supported") as refusal:
        as_workload(Plain, Data, callbacks=[own()])
    assert f"{__file__}:" in str(refusal.value)


def test_every_hook_of_lightning_and_every_callback_of_it_has_its_entry():
    never = {"on_sanity_check_start", "on_sanity_check_end"}  # nothing is checked before the first step
    hooks = {name for name in vars(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")}
    assert hooks - never - {h for h in hooks if "predict" in h} == {*HOOKS, *REFUSED_HOOKS}
    known = {*TRANSLATED, *LEFT_OUT, *REFUSED, "Callback", "Checkpoint", "LambdaCallback", "ProgressBar"}
    assert {name for name in lightnings.__all__ if isinstance(getattr(lightnings, name), type)} <= known


def test_the_table_of_the_docs_is_that_of_the_messages():
    text = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    for name, translation in TRANSLATED.items():
        refused = ", ".join(f"`{option}`" for option in translation.refused)
        assert f"| `{name}` | {translation.becomes} | {translation.idle} | {refused} |" in text


class Configures(Plain):
    def configure_callbacks(self):
        return [EarlyStopping("val_acc", mode="max", patience=2), LearningRateMonitor()]


def test_callbacks_of_the_module_replace_those_of_their_class():
    config = settled([EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")], module=Configures)
    assert (config.stop.watch, config.stop.patience) == ("val/acc max", 2)
    assert config.checkpoint.best == "val/loss min"


def test_a_monitor_that_nothing_logs_under_this_name_is_refused_at_the_first_evaluation():
    workload = as_workload(Plain, Data, callbacks=[EarlyStopping("loss")])()
    flags = {**TWO_EPOCHS, "stop.patience": 3, "stop.watch": "val/loss min"}
    with pytest.raises(WorkloadError, match="the monitor of EarlyStopping is loss: validation_step logs val_acc"):
        with_scaleray(workload, flags)


class Counts(L.Callback):
    """Counts batches, logs the count, and has a state."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        pl_module.log("batches", float(self.batches))
        pl_module.log("loss_seen", outputs["loss"], on_step=False, on_epoch=True)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("batches_so_far", float(self.batches))

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def logged(finished):
    found = [m for m in finished.messages if isinstance(m, LoggedMetrics)]
    return {(m.step, name): value for m in found for name, value in m.metrics.items()}


def test_a_callback_that_counts_batches_logs_with_the_module():
    workload = as_workload(Plain, Data, callbacks=[Counts()])()
    ours = logged(with_scaleray(workload, TWO_EPOCHS))
    assert [ours[step, "train/batches"] for step in range(1, 17)] == [float(step) for step in range(1, 17)]
    assert (ours[8, "train/batches_so_far_epoch"], ours[16, "train/batches_so_far_epoch"]) == (8.0, 16.0)
    _, trainer = with_lightning(Plain, workload, TWO_EPOCHS, callbacks=[Counts()])
    assert ours[16, "train/loss_seen_epoch"] == pytest.approx(float(trainer.callback_metrics["loss_seen"]), rel=1e-6)
    assert len(logged(with_scaleray(workload, TWO_EPOCHS))) == len(ours)  # the second training starts from copies


def diary(calls):
    """A callback that writes down its hooks, with what it sees of the training."""

    def noting(name):
        def hook(self, trainer, module, *args, **stage):
            numbers = [arg for arg in args if isinstance(arg, int)] if "validation" not in name else []
            calls.append((name, trainer.current_epoch, trainer.global_step, numbers))

        return hook

    return type("Diary", (L.Callback,), {name: noting(name) for name in HOOKS})()


def test_hooks_of_callbacks_are_called_in_lightnings_order():
    ours, theirs = [], []
    module = type("Both", (Plain,), {"on_train_epoch_start": lambda self: self.trainer.callbacks[0].__class__})
    with_scaleray(as_workload(module, Data, callbacks=[Writes(ours)])(), {**TWO_EPOCHS, "evaluation.micro_size": 8})
    with_lightning(module, as_workload(module, Data)(), TWO_EPOCHS, callbacks=[diary(theirs)])
    assert len(theirs) > 60
    assert ours == theirs


class Writes(L.Callback):
    """`diary` that is copied with its list."""

    def __init__(self, calls):
        self.calls = calls

    def __deepcopy__(self, memo):
        return diary(self.calls)


def test_a_callback_may_end_the_training():
    def stop(trainer, module):
        trainer.should_stop = trainer.current_epoch == 1

    ends = LambdaCallback(on_train_epoch_end=stop)
    finished = with_scaleray(as_workload(Plain, Data, callbacks=[ends])(), {"stop.after": "40 steps"})
    assert 16 <= len(finished.steps) <= 17


def trained(place, flags, folder=None, kill_at=None):
    workload = as_workload(Plain, Data, callbacks=[Counts()])()
    finished = train(place, workload, {**FLAGS, **flags}, folder=folder, kill_at=kill_at)
    return finished.weights, logged(finished), finished.events


@pytest.mark.combination
def test_states_of_callbacks_come_back_on_as_many_workers_and_on_fewer(gloo, tmp_path):
    flags = {**TWO_EPOCHS, "checkpoint.every": "5 steps", "deterministic": True}
    (weights, whole, _), *_ = gloo.run(2, trained, flags)
    for again_on in (2, 1):
        folder = tmp_path / f"{again_on}"
        gloo.run(2, trained, flags, folder, 12)
        (again, rest, events), *_ = gloo.run(again_on, trained, flags, folder)
        assert rest[16, "train/batches"] == 16.0
        assert rest == pytest.approx({key: value for key, value in whole.items() if key[0] > 10}, rel=1e-9)
        assert all(torch.allclose(weights[name], again[name], rtol=1e-9) for name in weights)
        assert not [event for event in events if "different states" in event]


def test_early_stopping_ends_after_the_step_at_which_lightnings_does():
    class Worsens(Plain):
        def validation_step(self, batch, batch_idx):
            step = float(self.global_step)
            self.log("val_loss", torch.tensor(abs(step - 16.0)))

    flags = {"stop.after": "80 steps"}
    callback = EarlyStopping("val_loss", patience=3)
    workload = as_workload(Worsens, Data, callbacks=[callback])
    settings = {"stop.patience": 3, "stop.watch": "val/loss min", "evaluation.every": "1 epoch"}
    assert {key: str(value.value) for key, value in workload().brought_settings(None).items()} == {
        key: str(value) for key, value in settings.items()
    }
    ours = with_scaleray(workload(), {**flags, **settings})
    _, trainer = with_lightning(Worsens, workload(), flags, callbacks=[EarlyStopping("val_loss", patience=3)])
    assert len(ours.steps) == trainer.global_step == 40


class Fails(L.Callback):
    """Ends the first of two trainings with an error."""

    has_failed = False

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 12 and not Fails.has_failed:
            Fails.has_failed = True
            raise RuntimeError("once")


def test_a_run_with_callbacks_is_resumed_and_its_record_has_their_settings(tmp_path, uri):
    config = {
        **{key: value for key, value in FLAGS.items() if value is not None}, "workload.name": f"{__file__}:Callbacks",
        "checkpoint.storage_path": str(tmp_path / "runs"), "tracking": {"uri": uri, "system_metrics": False},
    }  # fmt: skip
    callbacks = [EarlyStopping("val_loss", patience=9), ModelCheckpoint(every_n_train_steps=5), Fails()]
    workload = as_workload(Plain, Data, callbacks=callbacks)
    with pytest.raises(ScaleRayError, match="once"):
        scaleray.train(config, workload, local=True)
    with pytest.raises(ConfigError, match=r"stop\.patience is 2: EarlyStopping of the workload sets 9"):
        scaleray.train(
            {**config, "stop.patience": 2, **TWO_EPOCHS, "checkpoint.best": "val/loss min"}, workload, local=True
        )
    record = scaleray.train(config, workload, local=True, resume="auto")
    assert (record.resumed_after, record.steps) == ([10], 20)
    assert (record.config["stop"]["watch"], record.config["stop"]["patience"]) == ("val/loss min", 9)
