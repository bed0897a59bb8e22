"""Ladders inside one group: the order of turns, groups within groups, and what a turn measures."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from small_runs import Classify, make_job

from scaleray.emulation import EmulatedLayer, Timing
from scaleray.errors import PeerLostError
from scaleray.records.published import RankSample
from scaleray.records.study_record import NoiseHistory, Repeat, ToTarget
from scaleray.studies.measure_sizes import StudySize, SubGroups, measure_sizes, repeat_order
from scaleray.studies.repeat import AT_USUAL_SPEED, alone
from scaleray.training.setup.rank_context import RankContext

SHORT = {"steps": 4, "seconds": 0.0}


def study_size(workers, workload=None, *, turns=1, name=None, flags=None, **more):
    job, _ = make_job(
        workload or Classify(num_rows=48), {"tracking.every_steps": 10, **(flags or {})}, world_size=workers
    )
    return StudySize(name=name or f"w{workers}", workers=workers, job=job, num_turns=turns, **{**SHORT, **more})


# the order of turns


def test_every_round_has_every_rung_once_and_rounds_differ_in_their_order():
    study_sizes = [study_size(n, turns=6, name=str(n)) for n in (1, 2, 4)]
    order = repeat_order(study_sizes, seed=0)
    rounds = [[r.name for number, r in order if number == wanted] for wanted in range(6)]
    assert all(sorted(found) == ["1", "2", "4"] for found in rounds)
    assert len(set(map(tuple, rounds))) > 1
    assert order == repeat_order(study_sizes, seed=0) and order != repeat_order(study_sizes, seed=1)


def test_a_rung_that_was_measured_before_takes_only_what_is_missing():
    order = repeat_order([study_size(1, turns=3, name="new"), study_size(2, turns=1, name="nearly done")], seed=0)
    assert sorted(r.name for _, r in order) == ["nearly done", "new", "new", "new"]


@pytest.mark.parametrize(
    ("step_time_s", "period", "steps"), [(0.1, 1, 40), (0.01, 1, 300), (1e-5, 1, 2000), (0.1, 16, 48), (0.0, 1, 2000)]
)
def test_a_turn_lasts_its_steps_and_its_seconds_in_whole_periods_up_to_a_bound(step_time_s, period, steps):
    assert study_size(1, steps=40, seconds=3.0, period=period).steps_of_a_repeat(step_time_s) == steps


# groups within groups


def in_pool(place, function, *args):
    """Run a function that ends the pool's default group, and make that anew."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if place.rank == 0 else None
    ports = [None] * place.world_size
    dist.all_gather_object(ports, server.port if server else None)
    try:
        return function(place, *args)
    finally:
        store = server or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=60)
            )
            dist.barrier()


def visit(place):
    groups = SubGroups(RankContext(place.rank, place.world_size, node=f"node {place.rank % 2}"), timeout_s=60)
    seen = []
    for size in (2, 1, 3, 2):
        with groups.of(size) as mine:
            if mine is not None:
                total = mine.all_reduce([1.0])[0]
                seen.append((size, mine.rank, mine.local_rank, mine.local_world_size, total, dist.is_initialized()))
    said = groups.share(f"from {place.rank}")
    groups.close()
    return seen, said


def test_groups_of_any_size_are_taken_node_by_node_and_see_only_themselves(gloo):
    first, second, third = gloo.run(3, in_pool, visit)
    # ranks 0 and 2 are on node 0, so that they are the group of two
    assert first[0] == [
        (2, 0, 0, 2, 2.0, True),
        (1, 0, 0, 1, 1.0, False),
        (3, 0, 0, 2, 3.0, True),
        (2, 0, 0, 2, 2.0, True),
    ]
    assert second[0] == [(3, 2, 0, 1, 3.0, True)]
    assert third[0] == [(2, 1, 1, 2, 2.0, True), (3, 1, 1, 2, 3.0, True), (2, 1, 1, 2, 2.0, True)]
    assert {said for _, said in (first, second, third)} == {"from 0"}


def fail_inside(place):
    groups = SubGroups(place, timeout_s=60)
    try:
        with groups.of(1) as mine:
            if mine is not None:
                raise ValueError("my own")
    except (ValueError, PeerLostError) as exc:
        found = type(exc).__name__
    groups.close()
    return found


def test_workers_outside_hear_of_a_failure_instead_of_waiting(gloo):
    assert gloo.run(2, in_pool, fail_inside) == ["ValueError", "PeerLostError"]


# what is measured


def measure(place, study_sizes, workload):
    from scaleray.data import as_source

    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    told = []
    measure_sizes(place, study_sizes, 0, told.append, sources)
    return [(name, result) for name, result in told if not isinstance(result, RankSample)]


def kind_of(told, kind):
    return [result for _, result in told if isinstance(result, kind)]


@pytest.mark.combination
def test_a_ladder_measures_every_turn_of_every_rung(gloo):
    workload = Classify(num_rows=48)
    study_sizes = (
        study_size(1, workload, turns=2),
        study_size(2, workload, turns=2),
        study_size(2, workload, name="fsdp", flags={"strategy.name": "fsdp"}),
    )
    told, outside = gloo.run(2, in_pool, measure, study_sizes, workload)
    assert outside == []  # the first worker tells
    turns = {name: kind_of([m for m in told if m[0] == name], Repeat) for name in ("w1", "w2", "fsdp")}
    assert {name: len(found) for name, found in turns.items()} == {"w1": 2, "w2": 2, "fsdp": 1}
    one, two, sharded = turns["w1"][0], turns["w2"][0], turns["fsdp"][0]
    assert len(one.step_times_s) == len(one.input_waits_s) == 4
    assert [turn.round for turn in turns["w1"]] == [turn.round for turn in turns["w2"]] == [0, 1]
    assert one.alone_s is None and one.sent_bytes == 0 and one.comm_s is None
    num_parameters = 6 * 8 + 8 + 8 * 3 + 3
    assert two.sent_bytes == num_parameters * 8  # float64, each gradient once
    assert two.alone_s > 0 and two.slowest_alone_s >= two.alone_s and two.comm_s > 0
    assert sharded.alone_s > 0 and sharded.comm_s is None and sharded.sent_bytes > 0
    assert one.placement == {"node 0": 1} and two.placement == sharded.placement == {"node 0": 1, "node 1": 1}
    assert one.peak_memory_bytes > 0 and one.hardware[0]["device"] == "cpu" and not one.is_emulated


class Sleeping(Classify):
    def build_model(self):
        return EmulatedLayer(6, Timing(forward_s=1e-4), index=0)


@pytest.mark.combination
def test_emulated_models_and_parts_of_a_step_that_cannot_be_taken_alone_are_told(gloo):
    workload = Sleeping(num_rows=48)
    (told,) = gloo.run(1, measure, (study_size(1, workload),), workload)
    assert [turn.is_emulated for _, turn in told] == [True]
    workload = Classify(num_rows=48)
    flags = {"strategy.name": "tensor", "parallel.tensor": 2}
    told, _ = gloo.run(2, in_pool, measure, (study_size(2, workload, flags=flags),), workload)
    assert [turn.alone_s for turn in kind_of(told, Repeat)] == [None]


def test_a_training_to_the_target_is_told_with_its_evaluations(gloo):
    workload = Classify(num_rows=48, num_val=16)
    flags = {
        "evaluation.every": "1 epoch",
        "stop.at": "val/accuracy >= 0.5",
        "stop.after": "30 epochs",
        "optimizer.learning_rate": 0.5,
    }
    study_sizes = (study_size(1, workload, turns=0, flags=flags, trains_to_target=True),)
    (told,) = gloo.run(1, measure, study_sizes, workload)
    ((_, result),) = told
    assert result.is_reached and result.value >= 0.5 and result.metric == "val/accuracy"
    assert result.samples == result.curve[-1][0] == 8 * result.steps
    assert [samples for samples, _, _ in result.curve] == sorted(samples for samples, _, _ in result.curve)
    assert all(value < 0.5 for _, _, value in result.curve[:-1])


@pytest.mark.always("1-flags2-consecutive steps")
@pytest.mark.parametrize(
    ("workers", "flags", "way"),
    [(2, {}, "workers"), (1, {"batch.micro_size": 2}, "first micro-batch"), (1, {}, "consecutive steps")],
)
def test_noise_is_measured_apart_from_the_turns(gloo, workers, flags, way):
    workload = Classify(num_rows=48)
    flags = {"noise_scale.measure": True, **flags}
    study_sizes = (study_size(workers, workload, turns=1, flags=flags, measures_noise=True, steps=6),)
    run = [measure, study_sizes, workload]
    told = gloo.run(workers, in_pool, *run)[0] if workers > 1 else gloo.run(1, *run)[0]
    assert [type(result) for _, result in told if not isinstance(result, str)] == [Repeat, NoiseHistory]
    _, noise = told[-1]
    assert (noise.way, noise.covers) == (way, "its first steps")
    # in every step, although the config says every 20th; a first step has none before it
    assert noise.num_measurements == (5 if way == "consecutive steps" else 6)
    assert [samples for samples, _ in noise.curve] == [8 * step for step in range(6 - noise.num_measurements, 6)]
    assert any("noise scale: from" in note for note in kind_of(told, str))
    assert noise.scale is None or noise.scale > 0


def test_the_noise_of_a_training_to_the_target_is_that_of_its_whole_course(gloo):
    workload = Classify(num_rows=48, num_val=16)
    flags = {
        "evaluation.every": "1 epoch",
        "stop.at": "val/accuracy >= 1.0",
        "stop.after": "5 epochs",
        "noise_scale.measure": True,
        "noise_scale.every_steps": 3,
    }
    one = study_size(2, workload, turns=0, flags=flags, trains_to_target=True, measures_noise=True)
    told, _ = gloo.run(2, in_pool, measure, (one,), workload)
    (target,), (noise,) = kind_of(told, ToTarget), kind_of(told, NoiseHistory)
    assert len(told) == 2 and target.steps == 30
    assert noise.covers == "the training to the target"
    assert noise.num_measurements == 10 and noise.curve[-1][0] == 8 * 29


def test_alone_is_this_workers_share_as_a_training_of_one():
    job = study_size(2, flags={"batch.micro_size": 2}).job
    own = alone(job.changed(AT_USUAL_SPEED, first_steps=40), rank=1)
    assert study_size(2, flags={"noise_scale.measure": True}).job.config.noise_scale.measure is True
    assert (
        study_size(2, flags={"noise_scale.measure": True})
        .job.changed(AT_USUAL_SPEED, first_steps=4)
        .config.noise_scale.measure
        is False
    )
    recipe = own.recipe
    assert (recipe.strategy, recipe.global_batch_size, recipe.micro_batch_size, recipe.accumulation_steps) == (
        "single",
        4,
        2,
        2,
    )
    assert (own.world_size, recipe.total_steps, list(own.splits)) == (1, 20, ["train"])
    assert own.train_plan().global_batch_size == 4
