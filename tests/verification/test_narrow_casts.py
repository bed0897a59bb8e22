"""Finding where a workload's own code leaves float64, and saying what to do about it."""

import numpy as np
import pytest
import torch
from small_runs import Classify, rows
from torch import nn
from torch.nn import functional as F

from scaleray.errors import ConfigError
from scaleray.verification.bounds import BOUNDS
from scaleray.verification.repeatable.narrow_casts import narrow_casts, to_text
from scaleray.verification.verify_options import VerifyOptions

FEW = rows(4)


class CastLogits(Classify):
    def loss(self, model, batch):
        logits = model(batch["x"]).float()  # the place
        return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


class CastInside(Classify):
    """The next layer is float64, so that this one fails."""

    def build_model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                return self[2](self[0](x).to(torch.float32))  # the place

        return Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class CastTwice(Classify):
    def loss(self, model, batch):
        half = batch["x"].half().to(batch["x"].dtype)
        return F.cross_entropy(model(half).bfloat16().double(), batch["y"], reduction="sum"), len(batch["y"])


class WidensAndCounts(Classify):
    """Casts that lose nothing: to integers, to float64, of what was narrow already."""

    def loss(self, model, batch):
        scale = torch.ones(3, dtype=torch.float32).half().double()
        return (model(batch["x"]).double() * scale).sum() + batch["x"].long().sum() * 0, len(batch["y"])


@pytest.mark.parametrize(
    ("workload", "code"),
    [
        (CastLogits(), ["model(batch[\"x\"]).float()"]),
        (CastInside(), ["self[0](x).to(torch.float32)"]),
        (CastTwice(), [".half()", ".bfloat16()"]),
        (WidensAndCounts(), []),
        (Classify(), []),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_casts_below_float64_are_found_with_file_and_line(workload, code):
    before = torch.get_rng_state()
    found = narrow_casts(workload, FEW, gives_tuples=False)
    assert torch.equal(before, torch.get_rng_state())
    assert len(found) == len(code)
    for place, part in zip(found, code, strict=True):
        assert part in place and "test_narrow_casts.py:" in place


def test_the_advice_names_the_places_and_the_precision_to_compare_in():
    words = to_text([f"model.py:{line}: x.float()" for line in range(5)])
    assert "model.py:2" in words and "and 2 more" in words and "--precision fp32" in words
    assert to_text([]) == ""


def test_each_precision_has_a_bound_of_its_own_and_a_given_one_wins():
    assert [VerifyOptions(precision=name).allowed for name in BOUNDS] == list(BOUNDS.values())
    assert VerifyOptions(precision="fp32", bound=1e-6).allowed == 1e-6
    with pytest.raises(ConfigError, match="--bound"):
        VerifyOptions(bound=2.0)
    assert np.all(np.diff(sorted(BOUNDS.values())) >= 0) and BOUNDS["fp64"] < BOUNDS["fp32"] < BOUNDS["bf16"]
