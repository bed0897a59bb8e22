"""Metrics as torchmetrics objects, and a workload's own evaluate: over any number of workers what one process measures."""

from unittest import mock

import numpy as np
import pytest
import torch
from small_runs import NUM_FEATURES, Classify, rows, train, train_alone
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from scaleray.errors import ConfigError, StepFailedError, WorkloadError
from scaleray.training.step import whole_copy

pytestmark = pytest.mark.combination

torchmetrics = pytest.importorskip("torchmetrics")

FLAGS = {"stop.after": "4 steps", "evaluation.every": "2 steps", "evaluation.micro_size": 3}


class Ranks(Classify):
    """Two classes, ranked by the first logit. make: of the metric under test, by name."""

    def __init__(self, num_val=10, make="auroc"):
        super().__init__(num_val=num_val)
        self.make = make

    def metric_objects(self):
        return {"measured": MAKES[self.make](), "balance": torchmetrics.MeanMetric()}

    def metrics(self, model, batch):
        logits = model(batch["x"])
        hits = logits.argmax(1) == batch["y"]
        return {
            # of numbers beyond 0 and 1 torchmetrics takes the sigmoid, batch by batch
            "measured": (logits[:, 0].sigmoid(), (batch["y"] == 0).long()),
            "balance": {"value": logits[:, 0], "weight": batch["y"] + 1},
            "accuracy": (hits.sum(), len(hits)),
        }


class Unreduced(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=None)

    def update(self, scores, labels):
        self.total += scores.sum()

    def compute(self):
        return self.total


class MedianOf(torchmetrics.Metric):
    """A list without a rule, of one entry for each batch: workers have as many as they had batches."""

    def __init__(self):
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx=None)

    def update(self, scores, labels):
        self.scores.append(scores[labels == 1])

    def compute(self):
        return torch.cat(self.scores).median()


class Fails(torchmetrics.classification.BinaryAccuracy):
    def update(self, scores, labels):
        raise ValueError("these rows are odd")


class Pearson(torchmetrics.PearsonCorrCoef):
    """Tensors without a rule, as torchmetrics' own class knows to take them, one for each worker."""

    def update(self, scores, labels):
        super().update(scores, labels.to(scores.dtype))


MAKES = {
    "auroc": torchmetrics.classification.BinaryAUROC,
    "binned": lambda: torchmetrics.classification.BinaryAUROC(thresholds=20),
    "precision": torchmetrics.classification.BinaryAveragePrecision,
    "unreduced": Unreduced,
    "fails": Fails,
    "several": lambda: torchmetrics.classification.BinaryConfusionMatrix(),
    "pearson": Pearson,
    "median": MedianOf,
    "no metric": dict,
    "wrapper": lambda: torchmetrics.wrappers.MinMaxMetric(torchmetrics.classification.BinaryAccuracy()),
}


def by_hand(num_val):
    """AUROC from its definition, with the final weights of one worker."""
    finished = train_alone(Ranks(num_val), FLAGS)
    model = Classify().build_model().double()
    model.load_state_dict(finished.weights)
    val = rows(num_val, seed=1)
    with torch.no_grad():
        scores = model(torch.from_numpy(val["x"]).double())[:, 0].numpy()
    is_first = val["y"] == 0
    return float(np.mean(scores[is_first][:, None] > scores[~is_first][None]))


def evaluations(place, workload, flags):
    return [e.metrics for e in train(place, workload, flags).evaluations]


# 3 rows on 4 workers: one of them has none, and of single rows torchmetrics makes NaN in its correlation
@pytest.mark.always("auroc")
@pytest.mark.parametrize(
    ("make", "num_val"),
    [(make, rows) for make in ("auroc", "binned", "precision", "median") for rows in (10, 3)] + [("pearson", 10)],
)
def test_the_value_is_that_of_one_process_on_any_number_of_workers(gloo, make, num_val):
    flags = {**FLAGS, "batch.global_size": 8}
    alone = [e.metrics for e in train_alone(Ranks(num_val, make), flags).evaluations]
    if make == "auroc" and num_val == 10:
        assert alone[-1]["val/measured"] == pytest.approx(by_hand(10), rel=1e-6)
    for world_size in (2, 4):
        for found, expected in zip(
            gloo.run(world_size, evaluations, Ranks(num_val, make), flags)[0], alone, strict=True
        ):
            if make != "pearson":  # which adds up numbers in another order
                assert found["val/measured"] == expected["val/measured"]
            assert found == pytest.approx(expected, rel=1e-6) and len(found) == 4


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_placeholders_and_ranks_of_one_replica_do_not_count(gloo, strategy):
    flags = {**FLAGS, "strategy.name": strategy, **({"parallel.tensor": 2} if strategy == "tensor" else {})}
    alone = [e.metrics for e in train_alone(Ranks(3), FLAGS).evaluations]
    for found, expected in zip(gloo.run(2, evaluations, Ranks(3), flags)[0], alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("unreduced", r"Unreduced without a reduction of total \(Unreduced in .*test_torchmetrics.py:\d+\)"),
        ("wrapper", r"MinMaxMetric.*its state is stored in other metrics \(BinaryAccuracy\)"),
        ("no metric", r"metric_objects\(\)\['measured'\] is dict"),
        ("several", r"val/measured is \[2, 2\].*must be one number"),
        ("fails", r"(?s)metrics\(\)\['measured'\].*test_torchmetrics\.py.*these rows are odd"),
    ],
)
def test_what_cannot_be_brought_together_is_refused_by_name(make, text):
    with pytest.raises((WorkloadError, StepFailedError), match=text):
        train_alone(Ranks(make=make), FLAGS)


class Generates(Classify):
    """Evaluates by iterating the model on its own output, a number of times that depends on the rows."""

    def __init__(self, num_val=10, clashes=False):
        super().__init__(num_val=num_val)
        self.clashes = clashes

    def build_model(self):
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))

    def tensor_plan(self, model, *, size, sequence_parallel):
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def blocks(self, model):
        return list(model)

    def evaluate(self, model, batches, *, split, rank, world_size):
        assert split == "val" and 0 <= rank < world_size and not torch.is_grad_enabled() and not model.training
        total, count = 0.0, 0
        for batch in batches:
            for row in batch["x"]:
                state, steps = row[None], 0
                while state.abs().max() > 1e-3 and steps < 5:
                    state = torch.cat([model(state), torch.zeros(1, 3, dtype=state.dtype)], 1)
                    steps += 1
                total, count = total + state.sum(), count + 1
        return {"accuracy" if self.clashes else "generated": (total, count)}


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("zero1", 2), ("ddp", 4)])
@pytest.mark.parametrize("num_val", [10, 3])
def test_an_own_evaluate_sees_every_row_once(gloo, strategy, world_size, num_val):
    alone = [e.metrics for e in train_alone(Generates(num_val), FLAGS).evaluations]
    assert {"val/generated", "val/accuracy", "val/loss"} == alone[0].keys()
    found = gloo.run(world_size, evaluations, Generates(num_val), {**FLAGS, "strategy.name": strategy})[0]
    for ours, theirs in zip(alone, found, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-11)


@pytest.mark.each_value
@pytest.mark.parametrize("averaging", [None, 0.8])
@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 2), ("tensor", 4), ("pipeline", 4)])
def test_an_own_evaluate_runs_as_many_passes_as_it_likes_on_a_model_that_is_shared_out(
    gloo, strategy, world_size, averaging
):
    """On whole copies with the weights of each evaluation; workers of one replica take its rows in turn."""
    flags = {**FLAGS, "averaging.decay": averaging, "batch.micro_size": 2, "evaluation.micro_size": 1}
    alone = [e.metrics for e in train_alone(Generates(), flags).evaluations]
    size = {} if strategy == "fsdp" else {f"parallel.{strategy}": 2}
    found = gloo.run(world_size, evaluations, Generates(), {**flags, "strategy.name": strategy, **size})[0]
    assert len(found) == 2 and found[0]["val/generated"] != found[1]["val/generated"]
    for ours, theirs in zip(alone, found, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-11)


class KeepsItsModel(Generates):
    """Goes on with the model that it built last, and has a buffer that no state dict has."""

    def build_model(self):
        self.model = super().build_model()
        self.model.register_buffer("offset", torch.zeros(1), persistent=False)
        return self.model

    def loss(self, model, batch):
        if model.training:
            self.model.offset += 1.0
        return super().loss(model, batch)

    def evaluate(self, model, batches, **about):
        return {"offset": (model.offset.sum(), 1.0)}


def test_the_whole_copy_has_buffers_of_now_and_the_workload_keeps_the_model_that_is_trained(gloo):
    alone = [e.metrics["val/offset"] for e in train_alone(KeepsItsModel(), FLAGS).evaluations]
    found = gloo.run(2, evaluations, KeepsItsModel(), {**FLAGS, "strategy.name": "fsdp"})[0]
    assert [metrics["val/offset"] for metrics in found] == alone and alone[0] < alone[1]


def without_room(place, flags):
    with mock.patch.object(whole_copy, "_free_bytes", return_value=100.0):
        return evaluations(place, Generates(), {**FLAGS, **flags})


def test_an_own_evaluate_is_refused_where_a_worker_has_no_room_for_the_model_or_names_clash(gloo):
    with pytest.raises(WorkloadError, match=r"evaluate\(\).*needs the whole model .* MiB.*on each of the 2 workers"):
        gloo.run(2, without_room, {"strategy.name": "fsdp"})
    with pytest.raises(ConfigError, match=r"fsdp\.build_gib.*evaluate\(\) needs the whole model"):
        gloo.run(2, evaluations, Generates(), {**FLAGS, "strategy.name": "fsdp", "fsdp.build_gib": 0.1})
    with pytest.raises(
        (WorkloadError, StepFailedError), match=r"'accuracy'.*has the same name as a result of metrics\(\)"
    ):
        train_alone(Generates(clashes=True), FLAGS)
