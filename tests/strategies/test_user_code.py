"""What the user's code may do with the model: under every strategy what one process can, or a refusal on one worker already."""

import own_methods as own
import pytest
from small_runs import largest_difference, relative_differences, train, train_alone, train_in_plain_torch

from scaleray.errors import WorkloadError
from scaleray.strategies import STRATEGIES
from scaleray.verification.variants import GUARANTEES

FOR_MANY = sorted(set(STRATEGIES) - {"single"})
APART = sorted(set(FOR_MANY) & set(GUARANTEES))
WAYS = [own.ByTrainingStep, own.ByMethod, own.ByParts, own.ByWeight, own.Twice, own.PenaltyOfHead, own.PenaltyOfAll,
        own.GradientPenalty, own.Adversarial]  # fmt: skip
SHARDED = "weight that is sharded over the workers|where a worker holds only a part of it|sharded over the workers|outside of the layers' own forward"
PARTS, AGAIN = "used by its part", "gradients of gradients"
REFUSED = {
    "fsdp": {own.PenaltyOfAll: SHARDED, own.GradientPenalty: AGAIN},
    "tensor": {
        own.ByWeight: SHARDED,
        own.PenaltyOfHead: SHARDED,
        own.PenaltyOfAll: SHARDED,
        own.GradientPenalty: AGAIN,
    },
    "pipeline": {
        own.ByMethod: PARTS,
        own.ByParts: PARTS,
        own.ByWeight: PARTS,
        own.PenaltyOfHead: PARTS,
        own.PenaltyOfAll: PARTS,
        own.Twice: "called 2 times",
        own.GradientPenalty: "computes gradients",
        own.Adversarial: "computes gradients",
    },
}
"""What a strategy cannot do with a model, by what its refusal says."""
CASES = [(strategy, way) for strategy in FOR_MANY for way in WAYS]
ALLOWED = [case for case in CASES if case[1] not in REFUSED.get(case[0], {})]
FORBIDDEN = [case for case in CASES if case not in ALLOWED]
SHORT = {"stop.after": "3 steps", "local_sgd.sync_every": 2, "gossip.max_staleness": 1, "gossip.meet_every": 2}


def named(case):
    return f"{case[0]}-{case[1].__name__}"


def train_ways(place, strategy, ways):
    """One training after another, in one visit to the pool."""
    flags = {**SHORT, "strategy.name": strategy, "deterministic": strategy == "async_sgd"}
    return {way: train(place, way(num_val=5), flags) for way in ways}


@pytest.mark.always("ddp", "fsdp")
@pytest.mark.parametrize("strategy", FOR_MANY)
def test_the_users_code_gets_a_model_with_its_own_methods_parts_and_weights(gloo, strategy):
    # those that train apart share how they run the user's code, and have no oracle but themselves
    ways = [own.ByTrainingStep, own.ByParts] if strategy in APART else [w for name, w in ALLOWED if name == strategy]
    found = gloo.run(2, train_ways, strategy, [own.ByCall, *ways])[0]
    for way in ways:
        expected = found[own.ByCall] if strategy in APART else train_in_plain_torch(way(), SHORT)
        assert max(relative_differences(expected.losses, found[way].losses)) < 1e-9
        assert largest_difference(expected.weights, found[way].weights) < 1e-9
        assert found[way].evaluations


@pytest.mark.parametrize("case", FORBIDDEN, ids=named)
def test_what_a_strategy_cannot_do_is_refused_on_one_worker_already(case):
    strategy, way = case
    with pytest.raises(WorkloadError, match=REFUSED[strategy][way]):
        train_alone(way(), {**SHORT, "strategy.name": strategy})


def attempt_ways(place, strategy, ways):
    said = {}
    for way in ways:
        try:
            train(place, way(), {**SHORT, "strategy.name": strategy})
        except WorkloadError as exc:
            said[way] = str(exc)
    return said


@pytest.mark.parametrize("strategy", sorted(REFUSED))
def test_and_on_two_with_the_first_batch(gloo, strategy):
    # of a pipeline's two workers the second one knows more about some slips, while the first waits: those are seen alone
    ways = [way for way in REFUSED[strategy] if strategy != "pipeline" or REFUSED[strategy][way] == PARTS]
    for said in gloo.run(2, attempt_ways, strategy, ways):
        assert said.keys() == set(ways)


@pytest.mark.parametrize("case", [case for case in ALLOWED if case[0] in REFUSED], ids=named)
def test_what_a_strategy_can_do_is_not_refused_on_one_worker(case):
    strategy, way = case
    assert train_alone(way(), {"stop.after": "1 steps", "strategy.name": strategy}).summary.steps == 1
