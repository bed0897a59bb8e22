"""Where a model is built: on its device if its code can, else where it would be built by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
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
