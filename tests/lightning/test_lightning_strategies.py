"""A LightningModule on several workers is the training that it is on one, under every strategy that wraps a model."""

import pytest
from lit_modules import FLAGS, Data
from test_same_as_lightning import EveryStep
from verified import judge

from scaleray.lightning import as_workload


def judged(place, flags, accumulation=1):
    return judge(place, as_workload(EveryStep, Data)(), {**FLAGS, **flags}, accumulation)


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_it_equals_one_process_in_float64(gloo, strategy, world_size):
    outcome = gloo.run(world_size, judged, {"strategy.name": strategy}, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome
    assert outcome.own.largest < 1e-4


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_it_keeps_what_a_strategy_promises_that_is_another_training(gloo, strategy):
    outcome = gloo.run(2, judged, {"strategy.name": strategy, "local_sgd.sync_every": 2})[0]
    assert outcome.verdict == "as promised", outcome
