"""The moving average of the weights: torch's own arithmetic, on every strategy, through interruptions."""

import pytest
import torch
from small_runs import Classify, TiedAndFrozen, largest_difference, train, train_alone
from small_transformer import SmallTransformer

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.consolidated import AVERAGE, model_tensors
from scaleray.checkpoints.tensor_files import read_tensor
from scaleray.errors import ConfigError

pytestmark = pytest.mark.combination

FLAGS = {
    "stop.after": "9 steps", "averaging.decay": 0.8, "optimizer.name": "adamw", "optimizer.learning_rate": 0.02,
    "evaluation.every": "4 steps",
}  # fmt: skip
PLAIN = {**FLAGS, "averaging.decay": None}
WORKLOAD = Classify(num_val=10)


def by_hand(every):
    """The average of the weights that each step of the plain training leaves."""
    weights = [train_alone(WORKLOAD, {**PLAIN, "stop.after": f"{n} steps"}).weights for n in range(1, 10)]
    averages = None
    for step, of_step in enumerate(weights, 1):
        if step % every == 0 and averages is None:
            averages = of_step
        elif step % every == 0:
            averages = {name: 0.8 * averages[name] + 0.2 * value for name, value in of_step.items()}
    return averages


@pytest.mark.parametrize("every", [1, 2])
def test_the_final_weights_are_the_average_and_the_training_is_as_without(every):
    averaged, plain = train_alone(WORKLOAD, {**FLAGS, "averaging.every": every}), train_alone(WORKLOAD, PLAIN)
    assert averaged.losses == plain.losses
    assert plain.trained == {} and averaged.trained.keys() == plain.weights.keys()
    assert all(torch.equal(averaged.trained[name], value) for name, value in plain.weights.items())
    assert largest_difference(by_hand(every), averaged.weights) < 1e-12
    assert [e.metrics for e in averaged.evaluations] != [e.metrics for e in plain.evaluations]


def flags_of(strategy):
    return {**FLAGS, "strategy.name": strategy, **({"parallel.tensor": 2} if strategy == "tensor" else {})}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_two_workers_average_as_one_does(gloo, strategy):
    alone = train_alone(WORKLOAD, FLAGS)
    both = gloo.run(2, train, WORKLOAD, flags_of(strategy))[0]
    assert largest_difference(alone.weights, both.weights) < 1e-11
    assert largest_difference(alone.trained, both.trained) < 1e-11
    assert both.losses == pytest.approx(alone.losses, rel=1e-11)
    for ours, theirs in zip(alone.evaluations, both.evaluations, strict=True):
        assert theirs.metrics == pytest.approx(ours.metrics, rel=1e-11)


@pytest.mark.parametrize("shard", [1, "auto"])
def test_stages_of_a_pipeline_average_as_one_worker_does(gloo, shard):
    """On 4 workers: two stages, of which each is shared out over two replicas or whole on both."""
    flags = {**FLAGS, "stop.after": "5 steps", "evaluation.every": "2 steps", "batch.micro_size": 2}
    many = {**flags, "strategy.name": "pipeline", "parallel.pipeline": 2, "parallel.shard": shard}
    workload = SmallTransformer(num_val=6)
    alone = train_alone(workload, flags)
    four = gloo.run(4, train, workload, many)[0]
    assert largest_difference(alone.weights, four.weights) < 1e-11
    assert largest_difference(alone.trained, four.trained) < 1e-11
    for ours, theirs in zip(alone.evaluations, four.evaluations, strict=True):
        assert theirs.metrics == pytest.approx(ours.metrics, rel=1e-11)


def saved(folder, *, averaged):
    """The weights of the newest checkpoint."""
    catalog = Catalog.of_run(str(folder), None)
    manifest = catalog.newest()
    assert any(name.startswith(AVERAGE) for name in manifest.tensors)
    return {n: read_tensor(catalog.stores, t) for n, t in model_tensors(manifest, averaged=averaged).items()}


@pytest.mark.parametrize("workload", [WORKLOAD, TiedAndFrozen()], ids=["plain", "tied and frozen"])
def test_a_checkpoint_has_both(tmp_path, workload):
    finished = train_alone(workload, {**FLAGS, "checkpoint.every": "9 steps"}, folder=tmp_path)
    assert all(torch.equal(saved(tmp_path, averaged=True)[n], v) for n, v in finished.weights.items())
    assert all(torch.equal(saved(tmp_path, averaged=False)[n], v) for n, v in finished.trained.items())
    assert largest_difference(finished.weights, finished.trained) > 1e-6


def test_a_training_that_starts_from_such_a_run_starts_from_the_average(tmp_path):
    average = train_alone(WORKLOAD, {**FLAGS, "checkpoint.every": "9 steps"}, folder=tmp_path).weights
    flags = {**PLAIN, "workload.weights": str(tmp_path), "optimizer.learning_rate": 1e-30, "stop.after": "1 steps"}
    assert largest_difference(train_alone(WORKLOAD, flags).weights, average) < 1e-12


def resumed(place, flags, folder):
    whole = train(place, WORKLOAD, flags)
    train(place, WORKLOAD, flags, folder=folder, kill_at=6)
    return whole, train(place, WORKLOAD, flags, folder=folder)


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("fsdp", 2), ("zero1", 2)])
def test_a_resumed_run_is_bit_identical(gloo, tmp_path, strategy, world_size):
    flags = {**FLAGS, "strategy.name": strategy, "checkpoint.every": "2 steps", "averaging.every": 2}
    flags |= {"deterministic": True, "precision.dtype": "fp32"}
    whole, again = gloo.run(world_size, resumed, flags, str(tmp_path))[0]
    assert all(torch.equal(again.weights[name], value) for name, value in whole.weights.items())
    assert [e.metrics for e in again.evaluations] == [e.metrics for e in whole.evaluations[1:]]


def test_a_run_resumes_on_another_number_of_workers(gloo, tmp_path):
    flags = {**FLAGS, "checkpoint.every": "2 steps"}
    whole = train_alone(WORKLOAD, flags)
    gloo.run(2, killed, {**flags, "strategy.name": "fsdp"}, str(tmp_path))
    assert largest_difference(whole.weights, train_alone(WORKLOAD, flags, folder=tmp_path).weights) < 1e-11


def killed(place, flags, folder):
    train(place, WORKLOAD, flags, folder=folder, kill_at=5)


def test_a_checkpoint_without_an_average_goes_on_with_one_from_its_weights(tmp_path):
    train_alone(WORKLOAD, {**PLAIN, "checkpoint.every": "4 steps"}, folder=tmp_path, kill_at=8)
    flags = {**FLAGS, "checkpoint.every": "4 steps"}
    again = train_alone(WORKLOAD, flags, folder=tmp_path)
    assert [s.step for s in again.steps] == [9]  # its first update takes the weights as they are
    assert largest_difference(train_alone(WORKLOAD, PLAIN).weights, again.weights) < 1e-12


def test_replicas_that_train_apart_are_refused_by_name(gloo):
    with pytest.raises(ConfigError, match=r"averaging\.decay.*the workers of local_sgd hold"):
        gloo.run(2, train, WORKLOAD, {**FLAGS, "strategy.name": "local_sgd"})
