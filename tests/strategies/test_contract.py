"""What every strategy owes: it trains as one process of plain PyTorch would, whatever the number of workers.

The oracle is `train_in_plain_torch`. In float64 an honest reordering of sums differs by about 1e-13 after a few steps;
anything above 1e-9 is a bug, and 1e-12 is what is left when only the order inside one process may differ.
"""

import pytest
import torch
from small_runs import (
    Classify,
    Stepper,
    TiedAndFrozen,
    Tokens,
    WithBatchNorm,
    WithDropout,
    brought_together,
    largest_difference,
    make_job,
    relative_differences,
    rows,
    same_generators,
    train,
    train_alone,
    train_in_plain_torch,
    train_job,
    with_strategy,
)
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.strategies import STRATEGIES
from scaleray.strategies.tensor import HOOKS
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.variants import GUARANTEES

FOR_MANY = sorted(set(STRATEGIES) - {"single"})
EXACT = sorted(set(FOR_MANY) - set(GUARANTEES))
APART = sorted(set(FOR_MANY) & set(GUARANTEES))  # these promise less: see `scaleray verify`, and their own tests
# where each rank can run the model alone; the others' own tests say what they owe instead
WHOLE = sorted(set(FOR_MANY) - {"pipeline", "tensor"})

# 26 rows in batches of 8 leave a partial batch of 2: on 4 workers two of them have no row in it
RECIPES = {
    "one pass": {},
    "accumulation": {"batch.micro_size": 1},
    "clipping": {"optimizer.clip_norm": 0.3, "optimizer.weight_decay": 0.05},
    "adamw": {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5},
    "dropped last batch": {"batch.drop_last": True, "batch.micro_size": 2},
    "file order": {"data.shuffle": False},
}
ABOUT_ROWS = [RECIPES["dropped last batch"], RECIPES["file order"]]
OFTEN = {"local_sgd.sync_every": 4, "gossip.max_staleness": 2, "gossip.meet_every": 8}  # for short trainings
WORKLOADS = {"rows": Classify, "padded tokens": Tokens, "tied and frozen": TiedAndFrozen}


def assert_same_training(finished, plain, *, within):
    assert len(finished.losses) == len(plain.losses)
    assert max(relative_differences(plain.losses, finished.losses)) <= within
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= within
    assert largest_difference(plain.weights, finished.weights) <= within


# one worker


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_worker_equals_plain_torch(recipe, workload):
    assert_same_training(
        train_alone(workload(), recipe), train_in_plain_torch(workload(), recipe), within=1e-12
    )  # the loop divides by the count before the backward pass or after it, which rounds differently


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("workload", [Classify, WithBatchNorm, WithDropout])
def test_one_worker_equals_plain_torch_to_the_bit_when_every_row_counts_one(workload, dtype):
    recipe = {"precision.dtype": dtype}
    finished, plain = train_alone(workload(num_rows=32), recipe), train_in_plain_torch(workload(num_rows=32), recipe)
    assert finished.losses == pytest.approx(plain.losses, rel=1e-6)  # plain sums in float32, records in float64
    assert all(torch.equal(finished.weights[name], plain.weights[name]) for name in plain.weights)


# several workers


@pytest.mark.each_value(and_all="[accumulation-")  # of every strategy
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_many_workers_equal_one_process(gloo, recipe, strategy, world_size):
    # which rows a step has is decided before any strategy: there one workload is enough
    for workload in [Tokens] if recipe in ABOUT_ROWS else WORKLOADS.values():
        flags = {**recipe, "strategy.name": strategy}
        finished = gloo.run(world_size, train, workload(), flags)[0]
        assert_same_training(finished, train_in_plain_torch(workload(), recipe), within=1e-9)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_replicas_that_train_apart_learn_from_the_same_rows_nearly_as_well(gloo, recipe, strategy):
    flags = {"optimizer.momentum": 0.0, **OFTEN, **recipe, "stop.after": "12 epochs", "strategy.name": strategy}
    workload = Classify(num_rows=66, num_val=200)  # the last batch of an epoch has 2 rows
    plain = train_alone(workload, {**flags, "strategy.name": "single"})
    for world_size in (2, 4) if recipe == RECIPES["one pass"] else (2,):
        finished = gloo.run(world_size, train, workload, flags)[0]
        assert [s.num_samples for s in finished.steps] == [s.num_samples for s in plain.steps]
        assert [s.learning_rate for s in finished.steps] == [s.learning_rate for s in plain.steps]
        before, after, theirs = plain.losses[0], plain.evaluations[-1].metrics, finished.evaluations[-1].metrics
        # each worker clips its own norm, which is larger; DiLoCo makes few outer steps of Adam's many
        share = 0.5 if {"optimizer.clip_norm", "optimizer.name"} & recipe.keys() else 0.95
        assert before - theirs["val/loss"] > share * (before - after["val/loss"])


def initial_batches(place, strategy):
    job, sources = make_job(
        WithBatchNorm(num_rows=24, num_val=4), {"strategy.name": strategy}, world_size=place.world_size
    )
    setup = prepare(job.workload, job.config, job.recipe, place)
    plan = job.train_plan()
    for step in range(3):
        indices = plan.rank_indices(step, place.rank, place.world_size)
        batch = {n: torch.from_numpy(v) for n, v in sources["train"].read(indices).items()}
        batch["x"] = batch["x"].double()
        total, _ = setup.parallel.run(lambda model, batch=batch: job.workload.loss(model, batch))
        total.backward()
    before = {name: value.clone() for name, value in setup.parallel.module.named_buffers()}
    with setup.parallel.averaged(False):
        setup.parallel.before_evaluation()
        after = {name: value.clone() for name, value in setup.parallel.module.named_buffers()}
    setup.parallel.close()
    return before, after


@pytest.mark.parametrize("strategy", WHOLE)
def test_buffers_are_equal_on_all_ranks_before_an_evaluation(gloo, strategy):
    (before_0, after_0), (before_1, after_1) = gloo.run(2, initial_batches, strategy)
    assert not torch.equal(before_0["1.running_mean"], before_1["1.running_mean"])  # else there was nothing to share
    assert all(torch.equal(after_0[name], after_1[name]) for name in after_0)
    assert after_0["1.num_batches_tracked"] == 3


@pytest.mark.always("ddp", "fsdp", "pipeline")
@pytest.mark.parametrize("strategy", FOR_MANY)
def test_batch_norm_trains_on_several_workers_and_evaluates_alike(gloo, strategy):
    flags = {"strategy.name": strategy, "stop.after": "10 epochs", "batch.drop_last": True}
    flags["deterministic"] = strategy == "async_sgd"  # else how well it learns is a matter of time
    first, second = gloo.run(2, train, WithBatchNorm(num_rows=32, num_val=9), flags)
    assert first.losses[-1] < 0.7 * first.losses[0]
    assert second.evaluations == []  # rank 0 speaks for all
    model = WithBatchNorm().build_model().double()
    model.load_state_dict(first.weights)
    model.eval()
    val = rows(9, seed=1)
    with torch.no_grad():
        logits = model(torch.from_numpy(val["x"]).double())
        expected = nn.functional.cross_entropy(logits, torch.from_numpy(val["y"])).item()
    assert first.evaluations[-1].metrics["val/loss"] == pytest.approx(expected, rel=1e-12)


def dropped_units(place, strategy):
    job, _ = make_job(WithDropout(), {"strategy.name": strategy}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, place)
    masks = torch.stack([setup.parallel.module[1](torch.ones(64)) for _ in range(2)])
    setup.parallel.close()
    return masks


@pytest.mark.parametrize("strategy", WHOLE)
def test_dropout_differs_between_ranks_and_steps_but_not_between_runs(gloo, strategy):
    first, second = gloo.run(2, dropped_units, strategy), gloo.run(2, dropped_units, strategy)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0][0], first[0][1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.always("local_sgd")
@pytest.mark.parametrize("strategy", FOR_MANY)
def test_a_model_with_dropout_trains_the_same_way_twice(gloo, strategy):
    flags = {"strategy.name": strategy, "deterministic": strategy == "async_sgd"}  # else it is a matter of time
    first, second = (gloo.run(2, train, WithDropout(), flags)[0] for _ in range(2))
    assert first.losses == second.losses
    assert largest_difference(first.weights, second.weights) == 0
    assert first.losses != train_alone(WithDropout()).losses


# after the end


class KeepsModel(Classify):
    def build_model(self):
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return self.model


def train_and_go_on_alone(place, strategy):
    """A few steps together; then rank 0 alone, whose collectives would wait for ever."""
    workload = KeepsModel(num_rows=16)
    with same_generators():
        stepper = Stepper(place, workload, {"strategy.name": strategy})
        for step in (1, 2, 3, 4):
            stepper(step)
        weights = brought_together(stepper.parallel.weights(), place)
        stepper.setup.close()
    job, sources, model = stepper.job, stepper.sources, workload.model
    if place.world_size > 1:  # gradients may be views of memory that the strategy shares
        assert all(parameter.grad is None for parameter in model.parameters())
    if place.rank:
        return None
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    # replicas that train apart keep their own values, of which the final weights are the mean
    plain.load_state_dict(model.state_dict() if strategy in GUARANTEES else weights)
    batch = {n: torch.from_numpy(v) for n, v in sources["train"].read(plan_rows(job)).items()}
    batch["x"] = batch["x"].double()
    for candidate in (model, plain):
        optimizer = torch.optim.SGD(candidate.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            total, count = job.workload.loss(candidate, batch)
            (total / count).backward()
            optimizer.step()
    return model.state_dict(), plain.state_dict()


def plan_rows(job):
    return job.train_plan().global_indices(0)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_the_users_model_trains_alone_after_close(gloo, strategy):
    world_size = 1 if strategy == "single" else 2
    ours, plain = gloo.run(world_size, train_and_go_on_alone, strategy)[0]
    assert ours.keys() == plain.keys()  # no wrapper left in the names
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def left_on_the_model(place, strategy):
    """Hooks, gradients and classes that a whole run left on the model it trained."""
    workload = KeepsModel(num_rows=16)
    train(place, workload, {"strategy.name": strategy})
    parts = list(workload.model.modules())
    hooks = [h for m in parts for kind in HOOKS for h in getattr(m, kind)]
    return len(hooks), sum(p.grad is not None for p in workload.model.parameters()), {type(m).__name__ for m in parts}


@pytest.mark.parametrize("strategy", FOR_MANY)
def test_a_run_leaves_no_hook_and_no_gradient_on_the_model_even_where_that_stays_in_shards(gloo, strategy):
    assert gloo.run(2, left_on_the_model, strategy) == [(0, 0, {"Sequential", "Linear", "Tanh"})] * 2


@pytest.mark.parametrize("strategy", FOR_MANY)
def test_only_rank_0_returns_the_weights(gloo, strategy):
    outcomes = gloo.run(2, train, Classify(), {"strategy.name": strategy})
    assert outcomes[0].weights and not outcomes[1].weights


# what is refused, and what is not needed


class Lazy(Classify):
    def build_model(self):
        return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))


class AllFrozen(Classify):
    def build_model(self):
        return nn.Linear(6, 3).requires_grad_(False)


class NotAModel(Classify):
    def build_model(self):
        return lambda x: x


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize(
    ("workload", "says"), [(Lazy, "0.weight"), (AllFrozen, "2 frozen"), (NotAModel, "torch.nn.Module")]
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(workload, says, strategy):
    job, sources = make_job(workload())
    with pytest.raises(WorkloadError, match=says):
        train_job(RankContext(), with_strategy(job, strategy), sources)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_model_from_which_a_parameter_has_no_gradient_trains_the_others(strategy):
    finished = train_alone(TiedAndFrozen(), {"strategy.name": strategy})
    before = train_alone(TiedAndFrozen(), {"strategy.name": strategy, "optimizer.learning_rate": 1e-300})
    assert torch.equal(finished.weights["1.weight"], before.weights["1.weight"])
    assert not torch.equal(finished.weights["0.weight"], before.weights["0.weight"])
    assert torch.equal(finished.weights["0.weight"], finished.weights["3.weight"])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_can_be_named_for_one_worker(strategy):
    finished = train_alone(Classify(), {"strategy.name": strategy})
    assert finished.losses == train_alone(Classify()).losses
