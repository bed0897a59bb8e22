"""What is evaluated where replicas differ: their mean, as the final weights have it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import Classify, largest_difference, rows, train

NUM_VAL = 13
FLAGS = {
    "stop.after": "5 steps",
    "evaluation.every": "3 steps",
    "optimizer.learning_rate": 0.5,
    "batch.drop_last": True,
}
APART = [
    {"strategy.name": "local_sgd", "local_sgd.sync_every": 100},
    {"strategy.name": "diloco", "local_sgd.sync_every": 100},
]


def in_plain_torch(weights):
    """What an evaluation of these weights measures."""
    model = Classify().build_model().double()
    model.load_state_dict(weights)
    batch = {name: torch.from_numpy(values) for name, values in rows(NUM_VAL, seed=1).items()}
    logits = model(batch["x"].double())
    loss = F.cross_entropy(logits, batch["y"]).item()
    return {"val/loss": loss, "val/accuracy": (logits.argmax(1) == batch["y"]).double().mean().item()}


def evaluated(place, flags):
    """What a run measured at its end, the weights that it left, and this rank's own replica as its last step left it."""
    replica = {}

    class Watched(Classify):
        def build_model(self):
            replica["model"] = super().build_model()
            return replica["model"]

    finished = train(place, Watched(num_val=NUM_VAL), {**FLAGS, **flags})
    measured = finished.evaluations[-1].metrics if finished.evaluations else None
    return measured, finished.weights, {n: v.detach().clone() for n, v in replica["model"].state_dict().items()}


@pytest.mark.parametrize("flags", APART, ids=lambda flags: flags["strategy.name"])
def test_the_mean_of_the_replicas_is_evaluated_and_not_one_of_them(gloo, flags):
    (measured, weights, first), (_, _, second) = gloo.run(2, evaluated, flags)
    expected = in_plain_torch(weights)
    assert measured == pytest.approx(expected, rel=1e-9)
    for replica in (first, second):  # each has its own again
        assert abs(in_plain_torch(replica)["val/loss"] - expected["val/loss"]) > 1e-6
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    assert largest_difference(mean, weights) < 1e-12
