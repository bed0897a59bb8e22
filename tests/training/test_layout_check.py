"""Layouts that a model or its sequences do not fit: the workers' errors, before there is a worker."""

from __future__ import annotations

import sys

import pytest
import test_mixture_of_experts as experts
import test_shared_sequences as contexts
import test_tensor as tensors
import torch
from small_runs import Classify, make_job
from small_transformer import SmallTransformer
from torch import nn

from scaleray.data import TRAIN
from scaleray.errors import UsageError
from scaleray.launch.run.train import check_layout


class NeedsValues(Classify):
    """A loss that reads values, and fails for some of them."""

    def loss(self, model, batch):
        if float(batch["x"].sum()) != 0:
            raise ValueError("read")
        return super().loss(model, batch)


class Counts(SmallTransformer):
    """A loss that keeps what it has computed."""

    kept = None

    def loss(self, model, batch):
        self.kept = super().loss(model, batch)
        return self.kept


class Heads(SmallTransformer):
    """A transformer of three heads."""

    def __init__(self):
        super().__init__(num_heads=3, width=18)


class NoBlocks(Classify):
    def build_model(self):
        return nn.ModuleDict({"only": super().build_model()})


PIPELINE = {"parallel.pipeline": 8}
CASES = {
    **{f"context, {name}": (2, *case) for name, case in contexts.REFUSED.items() if name != "mask"},
    **{f"experts, {name}": (2, *case) for name, case in experts.REFUSED.items()},
    "no plan": (2, tensors.NoPlan(), tensors.TENSOR, r"lacks tensor_plan\(\): parallel.tensor 2 needs"),
    "a plan of another model": (2, tensors.Misspelt(), tensors.TENSOR, "no such module"),
    "tokens by tensor": (2, tensors.SevenTokens(), tensors.TENSOR, "has 7 entries along dimension 1: parallel.tensor"),
    "heads by tensor": (2, Heads(), tensors.TENSOR, "parallel.tensor is 2: it must divide num_heads, which is 3"),
    "heads by context": (4, SmallTransformer(), {"parallel.context": 4}, "must divide the 2 query heads"),
    "heads by context and tensor": (
        4,
        SmallTransformer(),
        {"parallel.context": 2, "parallel.tensor": 2},
        "must divide the 1 query heads",
    ),
    "blocks": (8, SmallTransformer(), PIPELINE, "made of 4 blocks: 8 workers with 1 stage each need 8"),
    "no blocks": (8, NoBlocks(), PIPELINE, r"lacks blocks\(\): parallel.pipeline needs"),
}


def looked_at(workers, workload, flags):
    job, sources = make_job(workload, flags, world_size=workers)
    check_layout(job, sources[TRAIN])


@pytest.mark.parametrize("case", CASES)
def test_a_layout_that_does_not_fit_is_refused_before_workers_start(case):
    workers, workload, flags, says = CASES[case]
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=f"(?s){says}"):
        looked_at(workers, workload, flags)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("workload", "flags"),
    [
        (SmallTransformer(), {"parallel.context": 2, "parallel.tensor": 2, "context.exchange": "ring"}),
        (SmallTransformer(), {"parallel.context": 4, "context.exchange": "ring"}),
        (SmallTransformer(num_experts=4), {"parallel.shard": 4, "parallel.expert": 4}),
        (SmallTransformer(), {"parallel.pipeline": 4}),
        (NeedsValues(), {"parallel.tensor": 2}),
        (contexts.Masked(), {"parallel.context": 2}),  # left to the workers, as its mask may depend on values
    ],
)
def test_a_layout_that_fits_and_a_loss_that_needs_values_pass(workload, flags):
    looked_at(4, workload, flags)


def test_a_workload_keeps_nothing_of_a_loss_without_values():
    workload = Counts()
    looked_at(2, workload, {"parallel.tensor": 2})
    assert workload.kept is None


def test_a_run_of_whole_models_is_not_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "scaleray.training.layout_check", None)
    looked_at(4, tensors.NoPlan(), {"parallel.replicate": 2, "parallel.shard": 2})
