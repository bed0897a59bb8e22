"""Activation checkpointing: less memory, the same training to the bit, the same names."""

import numpy as np
import pytest
import torch
from block_runs import Blocks, BlocksWithBatchNorm, BlocksWithDropout, BlocksWithSpectralNorm, TinyTransformer
from small_runs import Classify, largest_difference, make_job, train, train_alone, train_in_plain_torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from verified import judge

from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.health.live_memory import LiveTensors
from scaleray.training.setup import activation_checkpointing
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

POLICIES = {
    "full": {"activations.checkpointing": "full"},
    "every": {"activations.checkpointing": "every", "activations.every": 2},
    "selective": {"activations.checkpointing": "selective"},
}
WORKLOADS = [TinyTransformer, BlocksWithDropout, BlocksWithBatchNorm, BlocksWithSpectralNorm]


@pytest.mark.each_value
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_losses_and_weights_are_the_same_to_the_bit(workload, policy, dtype):
    recipe = {"batch.micro_size": 4, "batch.drop_last": True, "precision.dtype": dtype}
    plain, finished = train_alone(workload(), recipe), train_alone(workload(), {**recipe, **policy})
    assert finished.losses == plain.losses
    assert largest_difference(plain.weights, finished.weights) == 0  # names too


@pytest.mark.each_value
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_verify_judges_it_equal(gloo, policy, world_size):
    flags = {**policy, "optimizer.clip_norm": 0.3}
    outcome = gloo.run(world_size, judge, TinyTransformer(), flags, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_two_workers_equal_plain_torch(gloo, policy):
    plain = train_in_plain_torch(TinyTransformer())
    finished = gloo.run(2, train, TinyTransformer(), policy)[0]
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed, below whatever answers from a cache."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def memory_and_operations(policy):
    """Bytes that a forward pass leaves for the backward pass, and how many matrix products both take."""
    job, sources = make_job(TinyTransformer(num_rows=64), {**policy, "batch.global_size": 64})
    setup = prepare(job.workload, job.config, job.recipe, RankContext())
    batch = {name: torch.from_numpy(values) for name, values in sources["train"].read(np.arange(64)).items()}
    with LiveTensors() as live, Products() as products:
        total, _ = job.workload.loss(setup.parallel.model, batch)
        kept = live.bytes
        total.backward()
    setup.close()
    return kept, products.count


def test_memory_falls_for_more_arithmetic():
    (everything, few), (full, most) = memory_and_operations({}), memory_and_operations(POLICIES["full"])
    every, some = memory_and_operations(POLICIES["every"])
    selective, same = memory_and_operations(POLICIES["selective"])
    assert full < 0.4 * everything
    assert full < every < 0.8 * everything  # two of three blocks
    assert full < selective < 0.8 * everything
    assert few == same < some < most  # selective computes no matrix product again


@pytest.mark.parametrize("workload", [BlocksWithBatchNorm, BlocksWithDropout])
def test_nothing_is_left_of_it_after_close(workload):
    job, _ = make_job(workload(), POLICIES["full"])
    setup = prepare(job.workload, job.config, job.recipe, RankContext())
    module = setup.parallel.module
    assert all("forward" in block.__dict__ for block in module[:4])
    setup.close()
    assert not any("forward" in part.__dict__ for part in module.modules())


def test_blocks_are_put_back_when_the_setup_fails(monkeypatch):
    seen = {}

    class Failing(Blocks):
        def build_model(self):
            seen["model"] = super().build_model()
            return seen["model"]

        def optimizer(self, model, settings):
            assert "forward" in model[0].__dict__
            raise OSError("no optimizer")

    job, _ = make_job(Failing(), POLICIES["full"])
    with pytest.raises(OSError, match="no optimizer"):
        prepare(job.workload, job.config, job.recipe, RankContext())
    assert "forward" not in seen["model"][0].__dict__


class NamesStrangers(Blocks):
    def blocks(self, model):
        return [nn.Linear(1, 1)]


class NamesOneTwice(Blocks):
    def blocks(self, model):
        return [model[0], model[0]]


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (Classify, "applies to the model's blocks"),
        (NamesStrangers, "part of the model"),
        (NamesOneTwice, "returned one block twice"),
    ],
)
def test_a_workload_without_usable_blocks_is_refused(workload, says):
    with pytest.raises(WorkloadError, match=says):
        train_alone(workload(), POLICIES["full"])


@pytest.mark.parametrize("more", [{}, {"compilation.what": "model", "compilation.backend": "eager"}])
def test_a_budget_without_a_compiler_is_refused_with_the_reason(more):
    with pytest.raises(ConfigError, match="budget needs the compiler"):
        make_job(Blocks(), {"activations.checkpointing": "budget", **more})


def test_attention_with_dropout_is_computed_again_as_its_random_numbers_must_be():
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.zeros(1, 1, 2, 4)
    keep = activation_checkpointing.keep_or_repeat
    assert keep(None, attend, q, q, q) == CheckpointPolicy.MUST_SAVE
    assert keep(None, attend, q, q, q, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(None, attend, q, q, q, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(None, torch.ops.aten.mm.default, q, q) == CheckpointPolicy.MUST_SAVE
    assert keep(None, torch.ops.aten.gelu.default, q) == CheckpointPolicy.PREFER_RECOMPUTE
