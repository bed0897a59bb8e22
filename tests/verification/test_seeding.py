"""One seed, many streams; and the check that all ranks start from the same parameters."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import Classify, WithBatchNorm, make_job, same_generators
from torch import nn

from scaleray.common import equal_models
from scaleray.common.equal_models import check_equal_parameters, fingerprint_of
from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.errors import InitialisationError
from scaleray.strategies import STRATEGIES, Parallel
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext

# streams


@given(seed=st.integers(0, 2**63 - 1), rank=st.integers(0, 100_000))
def test_a_stream_seed_is_one_that_every_generator_takes(seed, rank):
    found = stream_seed(seed, "dropout", rank)
    assert 0 <= found < 2**63
    assert found == stream_seed(seed, "dropout", rank)
    with same_generators():
        seed_everything(found)


def test_streams_differ_by_seed_name_and_rank():
    seeds = {
        stream_seed(seed, *names) for seed in range(4) for names in [("model",), *(("dropout", r) for r in range(8))]
    }
    assert len(seeds) == 4 * 9


def test_a_seed_fixes_the_generators_of_torch_numpy_and_python():
    def draw():
        seed_everything(2**62 + 5)
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    with same_generators():
        assert draw() == draw()


# equal parameters


class RankDependent(Classify):
    """Draws one tensor from something that is not the same on all ranks."""

    def build_model(self):
        model = super().build_model()
        with torch.no_grad():
            model[2].bias += torch.distributed.get_rank()
        return model


def alone(model, mesh, config, workload):
    """A strategy that leaves every rank with what it built."""
    return Parallel(model=model, module=model)


def start(place, workload, strategy):
    """The initial hash after `prepare` with a strategy of the table, or with one that shares nothing."""
    job, _ = make_job(workload, world_size=place.world_size)
    if strategy is None:
        STRATEGIES["ddp"], original = alone, STRATEGIES["ddp"]
        try:
            return prepare(job.workload, job.config, job.recipe, place).initial_hash
        finally:
            STRATEGIES["ddp"] = original
    setup = prepare(job.workload, job.config, job.recipe, place)
    setup.parallel.close()
    return setup.initial_hash


def test_unequal_parameters_are_found_on_every_rank_and_named(gloo):
    failures = gloo.attempt(4, start, RankDependent(), None)
    for failure in failures:
        assert isinstance(failure.error, InitialisationError)
        assert "2.bias differs between rank 0 and ranks 1, 2, 3" in str(failure.error)
    with pytest.raises(InitialisationError, match="between rank 0 and rank 1:"):
        gloo.run(2, start, RankDependent(), None)


class OtherShapes(Classify):
    def build_model(self):
        width = 8 + torch.distributed.get_rank()
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, width), nn.Linear(width, 3))


class MoreLayers(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(torch.distributed.get_rank())))


class OtherTypes(Classify):
    def build_model(self):
        model = super().build_model()
        model.register_buffer("scale", torch.ones(2, dtype=[torch.int32, torch.int64][torch.distributed.get_rank()]))
        return model


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (OtherShapes, r"rank 0 built 1.weight [8, 8] float64 and rank 1 1.weight [9, 8] float64"),
        (MoreLayers, r"rank 0 built nothing more and rank 1 1.weight [3, 3] float64"),
        (OtherTypes, r"rank 0 built scale [2] int32 and rank 1 scale [2] int64"),
    ],
)
@pytest.mark.parametrize("strategy", [None, "ddp"])
def test_models_of_other_shapes_are_found_before_any_strategy_waits_for_them(gloo, workload, words, strategy):
    for failure in gloo.attempt(2, start, workload(), strategy):
        assert isinstance(failure.error, InitialisationError)
        assert words in str(failure.error)


def test_a_strategy_that_broadcasts_starts_all_ranks_from_rank_0(gloo):
    hashes = gloo.run(2, start, RankDependent(), "ddp")
    assert len(set(hashes)) == 1


def test_the_same_seed_builds_the_same_model_without_any_broadcast(gloo):
    hashes = gloo.run(4, start, Classify(), None)
    assert len(set(hashes)) == 1
    with same_generators():
        assert hashes[0] == start(RankContext(), Classify(), "single")


def digests_taken(place, flags):
    """(initial hash, tensors that were hashed, tensors that the model has) of a set-up with these settings."""
    job, _ = make_job(WithBatchNorm(), flags, world_size=place.world_size)
    with mock.patch.object(equal_models, "_digest", wraps=equal_models._digest) as digest:
        setup = prepare(job.workload, job.config, job.recipe, place)
    module = setup.parallel.module
    return setup.initial_hash, digest.call_count, len([*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_each_tensor_is_hashed_once_at_a_start_and_every_strategy_says_the_same(gloo, strategy):
    with same_generators():
        alone, _, _ = digests_taken(RankContext(), {})
    for found, taken, tensors in gloo.run(2, digests_taken, {"strategy.name": strategy}):
        assert found == alone and taken == tensors


def test_the_hash_of_the_parameters_follows_values_and_buffers():
    def changed(change):
        torch.manual_seed(0)
        model = WithBatchNorm().build_model()
        with torch.no_grad():
            change(model)
        return fingerprint_of(check_equal_parameters(model, None))

    with same_generators():
        hashes = [
            changed(lambda model: None),
            changed(lambda model: model[0].weight[0, 0].add_(1e-6)),
            changed(lambda model: model[1].running_mean[0].add_(1)),
            changed(lambda model: model[1].num_batches_tracked.add_(1)),
            changed(lambda model: model.double()),
        ]
        assert changed(lambda model: None) == hashes[0]
    assert len(set(hashes)) == 5 and all(len(h) == 16 for h in hashes)


def test_parameters_of_any_type_and_layout_can_be_hashed():
    model = nn.Module()
    model.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.nothing = nn.Parameter(torch.empty(0))
    model.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_buffer("mask", torch.tensor([True, False]))
    before = check_equal_parameters(model, None)
    model.mask[1] = True
    assert check_equal_parameters(model, None) != before
