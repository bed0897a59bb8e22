"""Metrics as torchmetrics objects, and a workload's own evaluate: over any number of workers what one process measures."""

import numpy as np
import pytest
import torch
from small_runs import NUM_FEATURES, Classify, rows, train, train_alone
from torch import nn

from scaleray.errors import StepFailedError, WorkloadError

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


class Fails(torchmetrics.classification.BinaryAccuracy):
    def update(self, scores, labels):
        raise ValueError("these rows are odd")


MAKES = {
    "auroc": torchmetrics.classification.BinaryAUROC,
    "binned": lambda: torchmetrics.classification.BinaryAUROC(thresholds=20),
    "precision": torchmetrics.classification.BinaryAveragePrecision,
    "unreduced": Unreduced,
    "fails": Fails,
    "several": lambda: torchmetrics.classification.BinaryConfusionMatrix(),
    "pearson": torchmetrics.PearsonCorrCoef,
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


# 3 rows on 4 workers: one of them has none
@pytest.mark.parametrize("num_val", [10, 3])
@pytest.mark.parametrize("make", ["auroc", "binned", "precision"])
def test_the_value_is_that_of_one_process_on_any_number_of_workers(gloo, make, num_val):
    flags = {**FLAGS, "batch.global_size": 8}
    alone = [e.metrics for e in train_alone(Ranks(num_val, make), flags).evaluations]
    if make == "auroc" and num_val == 10:
        assert alone[-1]["val/measured"] == pytest.approx(by_hand(10), rel=1e-6)
    for world_size in (2, 4):
        for found, expected in zip(
            gloo.run(world_size, evaluations, Ranks(num_val, make), flags)[0], alone, strict=True
        ):
            assert found["val/measured"] == expected["val/measured"]
            assert found == pytest.approx(expected, rel=1e-6) and len(found) == 4


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_placeholders_and_ranks_of_one_replica_do_not_count(gloo, strategy):
    flags = {**FLAGS, "strategy.name": strategy, **({"tensor.size": 2} if strategy == "tensor" else {})}
    alone = [e.metrics for e in train_alone(Ranks(3), FLAGS).evaluations]
    for found, expected in zip(gloo.run(2, evaluations, Ranks(3), flags)[0], alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("unreduced", r"Unreduced without a reduction of total.*dist_reduce_fx is None"),
        ("pearson", r"PearsonCorrCoef without a reduction of mean_x"),
        ("wrapper", r"MinMaxMetric.*its state lies in others \(BinaryAccuracy\)"),
        ("no metric", r"metric_objects\(\)\['measured'\] is 'dict'"),
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


def test_an_own_evaluate_is_refused_where_ranks_must_run_alike_or_names_clash(gloo):
    with pytest.raises((WorkloadError, StepFailedError), match=r"evaluate\(\).*equally many passes"):
        gloo.run(2, evaluations, Generates(), {**FLAGS, "strategy.name": "fsdp"})
    with pytest.raises((WorkloadError, StepFailedError), match=r"'accuracy'.*metrics\(\) has the same name"):
        train_alone(Generates(clashes=True), FLAGS)
