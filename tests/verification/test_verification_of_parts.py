"""`verify` where a replica lies on several workers: parameters are compared one by one, wherever they are."""

from unittest import mock

import pytest
from small_runs import Classify, TiedAndFrozen, WithBatchNorm, WithDropout
from small_transformer import SmallTransformer
from torch import nn
from verified import judge, knows_who_trains, many

from scaleray.errors import WorkloadError
from scaleray.strategies import tensor
from scaleray.strategies.pipeline.parts import Parts

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_correct_run_is_equal_in_every_parameter(gloo, strategy, world_size):
    flags = {"strategy.name": strategy, "optimizer.clip_norm": 0.3}
    for workload in (SmallTransformer(num_blocks=2), TiedAndFrozen()):
        outcome = gloo.run(world_size, judge, workload, flags, 2)[0]
        assert outcome.verdict == "equal" and outcome.words == "", outcome
        assert outcome.comparison.largest < 1e-12
        assert outcome.own.largest < 1e-4


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
@pytest.mark.parametrize(
    ("workload", "words"), [(WithDropout, "dropout off"), (WithBatchNorm, "one process used the statistics")]
)
def test_workers_of_a_replica_may_share_random_numbers(gloo, workload, words, strategy):
    outcome = gloo.run(2, judge, workload(num_rows=32), {"strategy.name": strategy}, 2)[0]
    assert outcome.verdict == "equal" and words in outcome.words, outcome


class Pools(Classify):
    """Changes the activation between its blocks, so that it makes no chain."""

    def build_model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                for layer in self:
                    x = 2 * layer(x)
                return x

        return Net(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))


def test_a_model_that_cannot_be_cut_is_refused_and_no_mismatch(gloo):
    outcome = gloo.run(2, judge, Pools(), {"strategy.name": "pipeline"})[0]
    assert outcome.verdict == "refused" and "not a chain of its blocks" in outcome.words


class Refuses(Classify):
    """Refuses its layout with the first rows, as attention does with the number of its heads."""

    def loss(self, model, batch):
        if many():
            raise WorkloadError("parallel.context", 4, "by heads it must divide the 2 query heads of a worker")
        return super().loss(model, batch)


def judge_refusing(place):
    with knows_who_trains():
        return judge(place, Refuses(), {"strategy.name": "ddp"})


def test_a_layout_that_the_model_refuses_with_the_first_rows_is_no_mismatch(gloo):
    outcome = gloo.run(2, judge_refusing)[0]
    assert outcome.verdict == "refused" and outcome.words.startswith("parallel.context is 4: by heads"), outcome


def judge_with_forgotten_tie(place, flags):
    sums = Parts.sum_gradients

    def without(self):
        if many():
            self._shared = []
        sums(self)

    with mock.patch.object(Parts, "sum_gradients", without), knows_who_trains():
        return judge(place, SmallTransformer(), flags)


def test_a_tied_gradient_that_is_not_summed_is_found_by_name(gloo):
    outcome = gloo.run(2, judge_with_forgotten_tie, {"strategy.name": "pipeline"})[0]
    assert outcome.verdict == "differs"
    assert (outcome.mismatch.step, outcome.mismatch.parameter) == (1, "embedding.weight")


def judge_with_local_norm(place, flags):
    with mock.patch.object(tensor, "total_norm", local_norm), knows_who_trains():
        return judge(place, SmallTransformer(num_blocks=1), flags)


def local_norm(gradients):
    return sum((g.to_local() if hasattr(g, "to_local") else g).pow(2).sum() for g in gradients).sqrt()


def test_a_norm_of_one_workers_part_is_found(gloo):
    outcome = gloo.run(2, judge_with_local_norm, {"strategy.name": "tensor", "optimizer.clip_norm": 0.3})[0]
    assert outcome.verdict == "differs" and outcome.mismatch.step == 1
