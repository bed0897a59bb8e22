"""Correct training passes in all its variety; what promises less is judged by that; what cannot be judged is said."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, TiedAndFrozen, Tokens, WithBatchNorm, WithDropout
from torch import nn
from verified import (
    broken_strategy,
    every_rank_reads_the_same,
    found,
    judge,
    judge_all,
    judge_with,
    knows_who_trains,
    many,
)

from scaleray.strategies import STRATEGIES, Parallel
from scaleray.training.setup import model_setup
from scaleray.verification import variants as verification
from scaleray.verification.variants import Guarantee

# what is right passes


RECIPES = {
    "sgd": {},
    "momentum": {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.05, "optimizer.nesterov": True},
    "adamw, clipping": {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.3},
    "schedule": {"schedule.name": "cosine", "schedule.warmup": "3 steps"},
    "dropped last batch": {"batch.drop_last": True},
}


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("workload", [Classify, Tokens, TiedAndFrozen])
def test_correct_training_is_equal_within_1e_9_and_to_rounding_in_float32(gloo, workload, recipe, world_size):
    outcome = gloo.run(world_size, judge, workload(), recipe, 2)[0]
    assert outcome.verdict == "equal" and outcome.words == "", outcome
    assert outcome.comparison.largest < 1e-13
    assert outcome.own.largest < 1e-4


@pytest.mark.combination
def test_one_process_repeats_itself_to_the_bit_and_with_accumulation_within_rounding(gloo):
    assert gloo.run(1, judge, Tokens(), {})[0].comparison.largest == 0
    accumulating = gloo.run(1, judge, Tokens(), {}, 2)[0]
    assert accumulating.verdict == "equal" and 0 < accumulating.comparison.largest < 1e-13


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("workload", "words"),
    [(WithDropout, "dropout off: masks differ"), (WithBatchNorm, "one process used the statistics of each worker's")],
)
def test_dropout_and_batch_norm_are_judged_by_what_they_promise(gloo, workload, words, world_size):
    outcome = gloo.run(world_size, judge, workload(num_rows=32), {}, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12, outcome
    assert words in outcome.words
    assert outcome.own.largest < 1e-4


class FunctionalDropout(Classify):
    """Dropout without a module, which evaluation mode switches off."""

    def build_model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                return super().forward(F.dropout(x, 0.5, self.training))

        return Net(nn.Linear(NUM_FEATURES, NUM_CLASSES))


@pytest.mark.combination
def test_dropout_without_a_module_is_judged_in_evaluation_mode(gloo):
    outcome = gloo.run(2, judge, FunctionalDropout(), {})[0]
    assert outcome.verdict == "equal" and "evaluation mode" in outcome.words


# what does not promise equality, and what is refused


@contextlib.contextmanager
def average_later():
    """Local SGD over three steps, in few lines."""

    def apply(model, mesh, config, workload):
        return Parallel(model=model, module=model)

    with broken_strategy(apply), mock.patch.dict(verification.GUARANTEES, {"broken": PROMISE}):
        yield


PROMISE = Guarantee(False, verification.GUARANTEES["local_sgd"].keeps, "replicas train apart")


@pytest.mark.combination
def test_a_strategy_that_does_not_promise_equality_is_judged_by_what_it_promises(gloo):
    outcome = gloo.run(2, judge_with, average_later, Classify())[0]
    assert outcome.verdict == "as promised" and outcome.words == "replicas train apart"
    assert outcome.comparison.largest > 1e-3


@contextlib.contextmanager
def average_later_on_other_rows():
    with average_later(), every_rank_reads_the_same():
        yield


def test_a_broken_promise_is_a_mismatch_of_its_class(gloo):
    outcome = gloo.run(2, judge_with, average_later_on_other_rows, Classify())[0]
    assert found(outcome)[:2] == ("data order", 1)


@contextlib.contextmanager
def a_strategy_that_refuses():
    def apply(model, mesh, config, workload):
        from scaleray.errors import WorkloadError

        raise WorkloadError("blocks()", None, "this strategy splits the model by its blocks")

    with broken_strategy(apply):
        yield


def test_a_strategy_that_does_not_take_the_workload_is_listed_with_the_reason(gloo):
    outcome = gloo.run(2, judge_with, a_strategy_that_refuses, Classify())[0]
    assert outcome.verdict == "refused" and "splits the model by its blocks" in outcome.words


class FailsOnManyWorkers(Classify):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total, count if not many() else -1


def test_a_run_that_fails_only_there_is_a_mismatch(gloo):
    outcome = gloo.run(2, judge_with, knows_who_trains, FailsOnManyWorkers())[0]
    assert found(outcome) == ("the run failed", 0, None)
    assert "the count returned by loss() is -1" in outcome.mismatch.why


def test_switches_of_torch_are_as_they_were_after_a_deterministic_run(gloo):
    assert gloo.run(1, switch_after, {"deterministic": True}) == [False]


def switch_after(place, flags):
    torch.use_deterministic_algorithms(False)
    judge(place, Classify(), flags)
    return torch.are_deterministic_algorithms_enabled()


APART = {
    "local_sgd": {"local_sgd.sync_every": 2},
    "warm-up": {"strategy.name": "local_sgd", "local_sgd.sync_every": 2, "local_sgd.warmup_steps": 2},
    "diloco": {"local_sgd.sync_every": 3},
    "gossip": {"gossip.graph": "ring"},
    "asynchronous": {"strategy.name": "gossip", "gossip.is_asynchronous": True},
    "async_sgd": {"gossip.meet_every": 3, "gossip.max_staleness": 1},
}


@pytest.mark.always("local_sgd", "diloco")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", APART)
def test_replicas_that_train_apart_keep_what_they_promise(gloo, name, world_size):
    for workload in (Classify(), Tokens()):
        outcome = gloo.run(world_size, judge, workload, {"strategy.name": name, **APART[name]})[0]
        assert outcome.verdict == "as promised", outcome
        assert outcome.comparison.largest > 1e-6  # else it would not be what it says


@contextlib.contextmanager
def forgets_to_average():
    """Local SGD that says it synchronises, and does nothing there."""

    def apply(model, mesh, config, workload):
        parallel = STRATEGIES["local_sgd"](model, mesh, config, workload)
        return dataclasses.replace(parallel, after_update=lambda step: None)

    with (
        broken_strategy(apply),
        mock.patch.dict(verification.GUARANTEES, {"broken": verification.GUARANTEES["local_sgd"]}),
    ):
        yield


@contextlib.contextmanager
def no_warm_up():
    """Local SGD whose warm-up does not average gradients."""

    def apply(model, mesh, config, workload):
        parallel = STRATEGIES["local_sgd"](model, mesh, config, workload)
        return dataclasses.replace(parallel, model=model)

    with (
        broken_strategy(apply),
        mock.patch.dict(verification.GUARANTEES, {"broken": verification.GUARANTEES["local_sgd"]}),
    ):
        yield


@pytest.mark.combination
def test_replicas_that_do_not_agree_after_their_averaging_are_found(gloo):
    outcome = gloo.run(2, judge_with, forgets_to_average, Classify(), {"local_sgd.sync_every": 2})[0]
    assert found(outcome)[:2] == ("averaging of replicas", 2)


@pytest.mark.combination
def test_a_warm_up_that_is_not_ddp_is_found_in_its_first_step(gloo):
    flags = {"local_sgd.sync_every": 2, "local_sgd.warmup_steps": 2}
    outcome = gloo.run(2, judge_with, no_warm_up, Classify(), flags)[0]
    assert found(outcome)[1] == 1


def groups_made(place, strategy):
    """(number of meshes that the trainings of two variants made, number of process groups after them)"""
    with mock.patch.object(model_setup, "build_mesh", wraps=model_setup.build_mesh) as made:
        outcomes = judge_all(place, Classify(), {"strategy.name": strategy}, (1, 2), resumes=True)
    assert [outcome.verdict for outcome in outcomes] == ["equal"] * 2
    return made.call_count, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["pipeline", "fsdp", "tensor"])
def test_variants_of_one_layout_share_a_mesh_and_leave_no_process_groups_whose_files_would_add_up(gloo, strategy):
    assert gloo.run(2, groups_made, strategy) == [(1, 1), (1, 1)]
