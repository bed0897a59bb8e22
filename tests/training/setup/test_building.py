"""Where a model is built: on its device if its code can, else where it would be built by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from small_runs import Classify, train_alone
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.training.setup.model_setup import _built

ELSEWHERE = torch.device("meta")  # any device that is not the CPU


class Plain:
    def build_model(self):
        return nn.Linear(3, 2)


class DrawsOnTheCpu:
    """Draws from generators of its own on the CPU, as data augmentation and many initialisations do."""

    def build_model(self):
        self.drawn = random.random(), np.random.rand(), torch.rand(1, device="cpu").item()
        model = nn.Linear(3, 2)
        with torch.no_grad():
            drawn = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
            model.weight.copy_(torch.from_numpy(drawn.numpy()))
        return model


class Fails:
    def build_model(self):
        raise KeyError("layers")


def test_a_model_is_built_where_it_will_live():
    assert {p.device.type for p in _built(Plain(), ELSEWHERE).parameters()} == {"meta"}
    assert {p.device.type for p in _built(Plain(), torch.device("cpu")).parameters()} == {"cpu"}


def test_code_that_needs_the_cpu_builds_there_and_draws_what_it_would():
    found = []
    for device in (torch.device("cpu"), ELSEWHERE):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        workload = DrawsOnTheCpu()
        model = _built(workload, device)
        found.append((workload.drawn, model.weight.tolist(), model.bias.tolist()))
    assert found[0] == found[1]


def test_an_error_of_the_user_stays_one():
    with pytest.raises(WorkloadError, match="layers"):
        _built(Fails(), ELSEWHERE)


class Wrapped(Classify):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def build_model(self):
        return self.wrap(super().build_model())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["compiled", "DataParallel", "both"],
)
def test_a_model_that_a_script_has_wrapped_trains_under_the_names_of_what_was_wrapped(wrap):
    plain, wrapped = train_alone(Classify()), train_alone(Wrapped(wrap))
    assert wrapped.weights.keys() == plain.weights.keys() and wrapped.losses == pytest.approx(plain.losses)


class Modest(nn.Module):
    """A module that has neither truth nor length, as a compiled one of another kind."""

    def __init__(self):
        super().__init__()
        self.net = Classify().build_model()

    def __bool__(self):
        raise TypeError("no truth")

    def forward(self, x):
        return self.net(x)


def test_nothing_asks_a_model_for_its_truth():
    assert len(train_alone(Wrapped(lambda model: Modest())).losses) > 1


class OwnForward(Modest):
    def __bool__(self):
        return True


def test_what_was_compiled_stays_compiled():
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph.forward(*args)

    train_alone(Wrapped(lambda model: torch.compile(OwnForward(), backend=backend)))
    assert calls
