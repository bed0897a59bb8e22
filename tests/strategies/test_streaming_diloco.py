"""Streaming DiLoCo: fragments that take their outer steps one after the other, while replicas train on."""

from __future__ import annotations

import pytest
import torch
from plain_replicas import simulated
from planted_by_a_reader import configured_otherwise
from planted_edits import Planted
from planted_in_gradients import rows
from planted_mistakes import judge
from small_runs import Classify, Tokens, largest_difference, make_job, relative_differences, train
from small_transformer import SmallTransformer
from torch import nn

from scaleray.strategies.diloco import fragments

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

FLAGS = {
    "strategy.name": "diloco",
    "local_sgd.sync_every": 4,
    "local_sgd.fragments": 2,
    "local_sgd.outer_momentum": 0.8,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 0.3,
    "batch.micro_size": 1,
    "stop.after": "15 steps",
}
OVERLAP = {"local_sgd.overlap": 1}
MIXING = {"local_sgd.mixing": 0.3}
LAYERS = [[0, 1], [2, 3]]
"""Positions of the parameters of two linear layers, of which each is a fragment."""
DEGREES = {
    "shards": {"parallel.replicate": 2, "parallel.shard": 2},
    "layers": {"parallel.replicate": 2, "parallel.tensor": 2},
    "stages": {"parallel.replicate": 2, "parallel.pipeline": 2},
}


def assert_same(finished, expected):
    assert max(relative_differences(expected["losses"], finished.losses)) <= 1e-9
    assert max(relative_differences(expected["norms"], finished.grad_norms)) <= 1e-9
    assert largest_difference(expected["weights"], finished.weights) <= 1e-9


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("more", [{}, OVERLAP, MIXING, {**OVERLAP, **MIXING}], ids=["", "overlap", "mixing", "both"])
def test_fragments_take_the_outer_steps_of_one_process(gloo, more, warmup):
    flags = {**FLAGS, **more, "local_sgd.warmup_steps": warmup}
    finished = gloo.run(2, train, Classify(num_rows=29), flags)[0]
    assert_same(finished, simulated(Classify(num_rows=29), flags, workers=2, fragments=LAYERS))


@pytest.mark.parametrize("more", [{"local_sgd.overlap": 2}, {**MIXING, "local_sgd.overlap": 3}], ids=str)
def test_all_parameters_may_be_one_fragment(gloo, more):
    flags = {**FLAGS, **more, "local_sgd.fragments": 1}
    finished = gloo.run(2, train, Classify(), flags)[0]
    assert_same(finished, simulated(Classify(), flags, workers=2, fragments=[[0, 1, 2, 3]]))


@pytest.mark.parametrize("degrees", DEGREES)
def test_fragments_of_replicas_over_several_workers_do_so_too(gloo, degrees):
    flags = {**FLAGS, **OVERLAP, **MIXING, **DEGREES[degrees], "batch.micro_size": 2}
    workers = 4 if degrees == "shards" else 2
    finished = gloo.run(4, train, Classify(num_rows=29), flags)[0]
    assert_same(finished, simulated(Classify(num_rows=29), flags, workers=workers, fragments=LAYERS))


def test_each_worker_of_a_pipeline_has_its_part_of_a_fragment(gloo):
    workload = SmallTransformer()
    names = [name for name, _ in workload.build_model().named_parameters()]
    flags = {**FLAGS, **OVERLAP, **DEGREES["stages"], "local_sgd.sync_every": 6, "local_sgd.fragments": 3}
    cut = fragments(names, make_job(workload, flags, world_size=4)[0].config.local_sgd)
    positions = [[i for i, name in enumerate(names) if cut[name] == number] for number in range(3)]
    assert sorted(i for own in positions for i in own) == list(range(len(names))) and all(positions)
    assert max(map(len, positions)) <= len(names) // 3 + 2
    assert_same(gloo.run(4, train, workload, flags)[0], simulated(workload, flags, workers=2, fragments=positions))


class ToOne(Classify):
    """The last layer has one output: a shard of it is empty."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]).square().sum(), len(batch["y"])


def interrupted(place, workload, flags, folder, kill_at):
    saved = train(place, workload, flags, folder=f"{folder}/whole")
    train(place, workload, flags, folder=f"{folder}/killed", kill_at=kill_at)
    return saved, train(place, workload, flags, folder=f"{folder}/killed")


@pytest.mark.parametrize("every", [3, 4], ids=["none", "one"])
@pytest.mark.parametrize("degrees", [None, "shards"])
def test_a_run_resumed_with_a_sum_in_flight_is_bit_identical(gloo, tmp_path, degrees, every):
    flags = {**FLAGS, **OVERLAP, **MIXING, **DEGREES.get(degrees, {}), "checkpoint.every": f"{every} steps"}
    flags = {**flags, "deterministic": True, "precision.dtype": "fp32"}
    workers = 2 if degrees is None else 4
    saved, resumed = gloo.run(workers, interrupted, ToOne(), flags, str(tmp_path), 2 * every + 1)[0]
    assert [step.step for step in resumed.steps] == list(range(2 * every + 1, 16))
    assert resumed.losses == saved.losses[2 * every :]
    assert all(torch.equal(resumed.weights[name], saved.weights[name]) for name in saved.weights)


def test_what_fragments_send_is_counted_and_their_distance_reported(gloo):
    finished = gloo.run(2, train, Tokens(), {**FLAGS, **OVERLAP})[0]
    rows = {row.group: row for row in finished.summary.profile.collectives if row.rank == 0}
    num_bytes = [8 * 55, 8 * (55 + 11)]  # an embedding, then a layer, in turn every second step
    assert rows["exchanges"].num_bytes == 4 * num_bytes[0] + 3 * num_bytes[1] and rows["exchanges"].count == 7


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"local_sgd.fragments": 3}, "must divide sync_every, 4"),
        ({"local_sgd.overlap": 2}, "the next fragment begins after 2 steps"),
        ({"local_sgd.node_sync_every": 2}, "averaged over all replicas"),
    ],
)
def test_schedules_that_do_not_fit_are_refused_with_the_reason(more, says):
    with pytest.raises(Exception, match=says):
        make_job(Classify(), {**FLAGS, **more}, world_size=2)


def test_under_local_sgd_they_have_no_effect(gloo):
    finished = gloo.run(2, train, Classify(), {**FLAGS, **OVERLAP, "strategy.name": "local_sgd"})[0]
    for key in ("fragments", "overlap"):
        assert f"local_sgd.{key} has no effect with strategy local_sgd" in finished.events


def judged_with(place, change, flags):
    with configured_otherwise("diloco", "local_sgd", lambda settings: change):
        training = Planted("", "", "", "", lambda: None, "diloco", 2, rows(Classify), flags)
        return judge(place, training, steps=8, accumulation=[1])


@pytest.mark.parametrize("change", [{"mixing": 0.0}, {"overlap": 0}, {"fragments": 1}], ids=str)
def test_verify_finds_fragments_that_are_not_those_of_the_config(gloo, change):
    flags = {"local_sgd.sync_every": 4, "local_sgd.fragments": 2, **OVERLAP, **MIXING}
    (outcome,) = gloo.run(2, judged_with, change, flags)[0]
    assert outcome.verdict == "differs"
