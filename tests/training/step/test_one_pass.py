"""An evaluation runs the model once a batch, where loss and metrics ask for the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from small_runs import Classify, Tokens, train, train_alone
from torch import nn

from scaleray.training.step.one_pass import OnePass

FLAGS = {"stop.after": "2 steps", "evaluation.every": "2 steps", "batch.micro_size": 4}


class Counting(nn.Module):
    """Counts its passes by mode."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.passes = inner, Counter()

    def forward(self, x, **more):
        self.passes["training" if self.training else "evaluation"] += 1
        return self.inner(x)


class Counted(Classify):
    def build_model(self):
        self.model = Counting(super().build_model())
        return self.model


class CountedTokens(Tokens):
    """Both slice the tokens, each for itself."""

    def datasets(self):
        found = super().datasets()
        return {**found, "val": {name: values[:12] for name, values in found["train"].items()}}

    def build_model(self):
        self.model = Counting(super().build_model())
        return self.model

    def metrics(self, model, batch):
        right = model(batch["tokens"][:, :-1]).argmax(dim=2) == batch["tokens"][:, 1:]
        return {"accuracy": ((right & batch["real"]).sum(), batch["real"].sum())}


class Apart(Counted):
    """The metrics ask for something else than the loss."""

    def metrics(self, model, batch):
        return {"accuracy": ((model(2 * batch["x"]).argmax(dim=1) == batch["y"]).sum(), len(batch["y"]))}


class TokensApart(CountedTokens):
    def metrics(self, model, batch):
        return super().metrics(model, {name: values.clone() for name, values in batch.items()})


@pytest.mark.parametrize(
    ("shared", "apart"), [(Counted(num_val=12), Apart(num_val=12)), (CountedTokens(), TokensApart())]
)
def test_loss_and_metrics_share_a_pass_of_the_same_rows_only(shared, apart):
    both = train_alone(shared, FLAGS), train_alone(apart, FLAGS)
    assert apart.model.passes["evaluation"] - shared.model.passes["evaluation"] == 3  # 12 rows in batches of 4
    losses = [finished.evaluations[0].metrics["val/loss"] for finished in both]
    assert losses[0] == losses[1]


class Twice(Classify):
    """Values computed without any sharing."""

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["x"].clone()).argmax(dim=1) == batch["y"]).sum(), len(batch["y"]))}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "gossip"])
def test_what_is_measured_is_the_same_to_the_bit(gloo, strategy):
    flags = {**FLAGS, "strategy.name": strategy, "batch.global_size": 8, "batch.micro_size": 2}
    for once, twice in zip(
        gloo.run(2, train, Classify(num_val=13), flags), gloo.run(2, train, Twice(num_val=13), flags), strict=True
    ):
        assert [e.metrics for e in once.evaluations] == [e.metrics for e in twice.evaluations]


def passes(look, batch):
    model = Counting(nn.Linear(3, 2)).eval()
    once = OnePass(batch)
    with torch.no_grad(), once.of(model):
        look(model, *batch)
    assert "forward" not in vars(model)
    return model.passes["evaluation"]


def into_the_result(model, x):
    model(x).zero_()
    assert model(x).abs().sum() > 0


def into_the_rows(model, x):
    first = model(x)
    x.add_(1)
    assert not torch.equal(first, model(x))


def with_gradients(model, x):
    model(x)
    with torch.enable_grad():
        assert model(x).requires_grad


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda model, x: (model(x), model(x)), 1),
        (lambda model, x: (model(x), model(x[:])), 1),
        (lambda model, x: (model(x[1:]), model(x[:-1])), 2),
        (lambda model, x: (model(x, mode="a"), model(x, mode="a"), model(x, mode="b")), 2),
        (lambda model, x: (model(x, mask=object()), model(x, mask=object())), 2),
        (lambda model, x: (model(x * 1), model(x * 1)), 2),  # memory that may have been another tensor's
        (into_the_result, 2),
        (into_the_rows, 2),
        (with_gradients, 2),
    ],
)
def test_only_the_same_pass_is_shared(look, expected):
    assert passes(look, [torch.arange(12.0).reshape(4, 3)]) == expected
