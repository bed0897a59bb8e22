"""torchmetrics objects that a module logs: their value is that over all rows, on any number of workers."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lit_modules import FLAGS, NUM_CLASSES, Data, Plain, with_lightning, with_scaleray
from small_runs import same_generators, train

from scaleray.errors import WorkloadError
from scaleray.lightning import as_workload
from scaleray.records.run_record import LoggedMetrics
from scaleray.training.setup.rank_context import RankContext

FLAGS_OF = {**FLAGS, "stop.after": "16 steps", "evaluation.every": "1 epoch"}


class LastMean(torchmetrics.Metric):
    """Mean of each worker's own mean, by a rule that does not add up."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("batches", [], dist_reduce_fx="cat")

    def update(self, values):
        self.batches.append(values.detach().mean()[None])
        self.mean = torch.cat(self.batches).mean()

    def compute(self):
        return self.mean


class Measured(Plain):
    """Metrics that are no mean over rows, alone and in a collection."""

    def __init__(self):
        super().__init__()
        task = {"task": "multiclass", "num_classes": NUM_CLASSES}
        self.train_acc = torchmetrics.Accuracy(**task)
        self.auroc = torchmetrics.AUROC(**task)
        self.both = torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.F1Score(**task, average="macro"),
                "recall": torchmetrics.Recall(**task, average="macro"),
            },
            prefix="val_",
        )
        self.by_hand = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.auroc.update(logits.softmax(1), batch[1])
        self.both.update(logits, batch[1])
        self.by_hand.update((logits.argmax(1) == batch[1]).double())
        self.log("val_auroc", self.auroc)
        self.log_dict(self.both)
        self.log("val_loss", F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_by_hand", self.by_hand.compute())
        self.by_hand.reset()


class Resumed(Measured):
    def __init__(self):
        super().__init__()
        self.seen = LastMean()

    def training_step(self, batch, batch_idx):
        self.seen(batch[0][:, 0])
        self.log("train_seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


NAMES = ["val_auroc", "val_f1", "val_recall", "val_loss", "val_by_hand"]


def measured(place, flags=None, folder=None, kill_at=None, *, module=Measured, with_events=False):
    flags = {**FLAGS_OF, **(flags or {})}
    with same_generators():
        finished = train(place, as_workload(module, Data)(), flags, folder=folder, kill_at=kill_at)
    logged = {
        (m.step, name): v for m in finished.messages if isinstance(m, LoggedMetrics) for name, v in m.metrics.items()
    }
    evaluations = [e.metrics for e in finished.evaluations]
    return (evaluations, logged, finished.events) if with_events else (evaluations, logged)


def test_metric_objects_have_lightnings_values():
    workload = as_workload(Measured, Data)()
    ours = with_scaleray(workload, {"stop.after": "16 steps", "evaluation.every": "1 epoch"})
    _, trainer = with_lightning(Measured, workload, {"stop.after": "16 steps"})
    logged = {name: v for m in ours.messages if isinstance(m, LoggedMetrics) for name, v in m.metrics.items()}
    found = {**ours.evaluations[-1].metrics, **logged}
    for name in NAMES:
        assert found[name.replace("val_", "val/")] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-5), (
            name
        )
    assert found["train/acc_epoch"] == pytest.approx(float(trainer.callback_metrics["train_acc"]), rel=1e-5)


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_several_workers_they_are_those_of_one_whatever_rows_a_worker_has(gloo, strategy):
    [(alone, logged)] = gloo.run(1, measured)
    # 21 rows in micro-batches of 5 on 2 workers: the last one is a single row, and one worker has none
    [(together, others), _] = gloo.run(2, measured, {"strategy.name": strategy, "evaluation.micro_size": 5})
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert logged == pytest.approx(others, rel=1e-5) and len(logged) == 4


measured_again = functools.partial(measured, module=Resumed)
RESUMED = {"checkpoint.every": "5 steps", "deterministic": True, "precision.dtype": "fp32", "evaluation.every": None}


def test_a_run_resumed_in_the_middle_of_an_epoch_logs_what_the_whole_one_does(tmp_path):
    """Killed after step 12 of epochs of 8 steps, it goes on after step 10 with what steps 9 and 10 have added up."""
    _, whole = measured_again(RankContext(), RESUMED)
    measured_again(RankContext(), RESUMED, str(tmp_path), 12)
    _, again = measured_again(RankContext(), RESUMED, str(tmp_path))
    of_epochs = {key: value for key, value in whole.items() if key[0] > 10}
    assert of_epochs == again and {"train/acc_epoch", "train/seen_epoch"} <= {name for _, name in again}


def test_another_number_of_workers_goes_on_with_what_all_have_added_up(gloo, tmp_path):
    """But for a mean of means, which begins anew and says so."""
    _, whole = measured_again(RankContext(), RESUMED)
    gloo.run(2, measured_again, RESUMED, str(tmp_path), 12)
    _, again, events = measured_again(RankContext(), RESUMED, str(tmp_path), with_events=True)
    assert again[16, "train/acc_epoch"] == pytest.approx(whole[16, "train/acc_epoch"], rel=1e-6)
    assert again[16, "train/seen_epoch"] != pytest.approx(whole[16, "train/seen_epoch"], rel=1e-6)
    assert len([event for event in events if "seen: the workers' states cannot be added" in event]) == 1


class Unreduced(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=None)

    def update(self, values):
        self.total += values.sum()

    def compute(self):
        return self.total


class WithUnreduced(Plain):
    def __init__(self):
        super().__init__()
        self.odd = Unreduced()


def refused(place):
    with pytest.raises(WorkloadError) as caught:
        train(place, as_workload(WithUnreduced, Data)(), FLAGS)
    return str(caught.value)


def test_a_metric_without_a_reduction_is_refused_on_several_workers_with_its_line(gloo):
    message, _ = gloo.run(2, refused)
    assert "the metric self.odd is " in message and f"(Unreduced in {__file__}:" in message
    assert len(with_scaleray(as_workload(WithUnreduced, Data)()).steps) == 20


def test_predictions_are_those_of_predict_step():
    workload = as_workload(Measured, Data)()
    model = workload.build_model()
    rows = {"split": "train", "rows": 2, "batch": torch.zeros(2, 6)}
    assert workload.predict(model, rows)["prediction"].shape == (2, NUM_CLASSES)
