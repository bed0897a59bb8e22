"""What is DDP's own: how often it communicates, its options, and models of which some parameters are not used."""

import subprocess
import sys

import pytest
import torch
from small_runs import Classify, make_job, relative_differences, train, train_in_plain_torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.training.setup.model_setup import prepare
from scaleray.training.step.step import TrainStep


def bucket_reductions(place, micro_size):
    """How often a bucket was all-reduced in each of three steps of 4 rows a rank."""
    job, sources = make_job(Classify(num_rows=24), {"batch.micro_size": micro_size}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, place)
    buckets = []

    def count(state, bucket):
        buckets.append(bucket.index())
        return allreduce_hook(state, bucket)

    setup.parallel.model.register_comm_hook(None, count)
    step, plan, per_step = (
        TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False),
        job.train_plan(),
        [],
    )
    for number in range(3):
        buckets.clear()
        rows = sources["train"].read(plan.rank_indices(number, place.rank, place.world_size))
        step(RankBatch(number, rows, len(rows["y"])), num_rows=plan.num_rows(number), want_norm=False)
        per_step.append(len(buckets))
    setup.parallel.close()
    return per_step


@pytest.mark.parametrize("micro_size", [1, 2, 4])
def test_gradients_are_reduced_once_a_step_however_many_micro_batches(gloo, micro_size):
    assert gloo.run(2, bucket_reductions, micro_size) == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy.gradient_as_bucket_view": False},
        {"strategy.bucket_size_mib": 1e-4},
        {"strategy.static_graph": True, "batch.micro_size": None},
        {"strategy.find_unused_parameters": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_option_changes_the_training(gloo, options):
    flags = {"batch.micro_size": 2, **options}
    finished = gloo.run(2, train, Classify(), flags)[0]
    plain = train_in_plain_torch(Classify(), flags)
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9


ADVICE = """
import sys
import torch
from torch import distributed as dist
from scaleray.config import load_config
from scaleray.strategies.ddp import looking_for_unused

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
values = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
if sys.argv[1] == "ours":
    assert looking_for_unused(load_config(flags=values, environ={})).strategy.find_unused_parameters
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_torch_advises_on_a_search_for_unused_parameters_unless_it_is_ours(whose):
    done = subprocess.run(
        [sys.executable, "-c", ADVICE, whose], capture_output=True, text=True, check=True, timeout=100
    )
    assert ("find_unused_parameters=True was specified" in done.stderr) == (whose != "ours")


class UsesOneHead(nn.Module):
    def __init__(self, heads=None):
        super().__init__()
        self.heads = heads or nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)})

    def forward(self, x):
        return self.heads["used"](x)


class SkipsParameters(Classify):
    def build_model(self):
        return UsesOneHead()


def test_unused_parameters_fail_with_torchs_advice_and_train_with_the_option(gloo):
    with pytest.raises(WorkloadError, match="find-unused-parameters"):
        gloo.run(2, train, SkipsParameters())
    flags = {"strategy.find_unused_parameters": True, "batch.micro_size": 2}
    finished = gloo.run(2, train, SkipsParameters(), flags)[0]
    plain = train_in_plain_torch(SkipsParameters(), flags)
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert torch.equal(finished.weights["heads.unused.weight"], plain.weights["heads.unused.weight"])
