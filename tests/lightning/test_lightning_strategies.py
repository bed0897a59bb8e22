"""A LightningModule on several workers is the training that it is on one, under every strategy that wraps a model."""

import pytest
from lit_modules import FLAGS, Data
from small_runs import train
from test_same_as_lightning import EveryStep
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from verified import judge

from scaleray.errors import WorkloadError
from scaleray.lightning import as_workload

pytestmark = pytest.mark.combination


def judged(place, flags, accumulation=1):
    return judge(place, as_workload(EveryStep, Data)(), {**FLAGS, **flags}, accumulation)


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_it_equals_one_process_in_float64(gloo, strategy, world_size):
    outcome = gloo.run(world_size, judged, {"strategy.name": strategy}, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome
    assert outcome.own.largest < 1e-4


class Planned(as_workload(EveryStep, Data)):
    """A class derived from that of a module, with what a strategy needs beside."""

    def tensor_plan(self, model, *, size, sequence_parallel):
        return {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}

    def blocks(self, model):
        return list(model.net)


def judged_with_a_plan(place, flags):
    return judge(place, Planned(), {**FLAGS, **flags}, 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_with_a_plan_its_layers_are_split_over_workers(gloo, world_size):
    outcome = gloo.run(world_size, judged_with_a_plan, {"strategy.name": "tensor", "parallel.tensor": 2})[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome


def refused(place, has_plan, flags):
    workload = Planned() if has_plan else as_workload(EveryStep, Data)()
    with pytest.raises(WorkloadError) as caught:
        train(place, workload, {**FLAGS, **flags})
    return str(caught.value)


def test_strategies_that_cannot_take_it_are_refused_by_name(gloo):
    (message, _) = gloo.run(2, refused, False, {"strategy.name": "tensor", "parallel.tensor": 2})
    assert "lacks tensor_plan()" in message and "fsdp" in message
    (message, _) = gloo.run(2, refused, True, {"strategy.name": "pipeline", "parallel.pipeline": 2})
    assert "in a pipeline" in message and "lit_modules.py:" in message and "--strategy.name fsdp" in message


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_it_keeps_what_a_strategy_promises_that_is_another_training(gloo, strategy):
    outcome = gloo.run(2, judged, {"strategy.name": strategy, "local_sgd.sync_every": 2})[0]
    assert outcome.verdict == "as promised", outcome
