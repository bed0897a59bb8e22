"""What a study is going to measure, and what it refuses before anything starts."""

from __future__ import annotations

import pytest
from small_runs import DEFAULTS, Classify

from scaleray.config import load_config
from scaleray.data import load_sources
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster.connection import Node
from scaleray.studies import hardware as study_places
from scaleray.studies.study import make_study_sizes
from scaleray.studies.study_options import MODES, StudyOptions


def config(**flags):
    return load_config(flags={**DEFAULTS, **flags}, environ={})


def study_sizes(question, **flags):
    workload = Classify(num_rows=400)
    return make_study_sizes(config(**flags), question, workload, load_sources(workload))


def test_strong_divides_the_batch_and_weak_lets_it_grow():
    made = study_sizes(StudyOptions(world_sizes=[4, 1, 2, 2], mode="weak,strong"))
    found = [
        (mode, study_size.workers, name)
        for mode in MODES
        for name, study_size in made.items()
        if mode in study_size.modes
    ]
    assert found == [
        ("strong", 1, "w001-b8-m8-single"),
        ("strong", 2, "w002-b8-m4-ddp"),
        ("strong", 4, "w004-b8-m2-ddp"),
        ("weak", 1, "w001-b8-m8-single"),
        ("weak", 2, "w002-b16-m8-ddp"),
        ("weak", 4, "w004-b32-m8-ddp"),
    ]
    assert len(made) == 5  # the base stands on both curves and is measured once


def test_weak_scaling_counts_from_the_smallest_size():
    made = study_sizes(StudyOptions(world_sizes=[2, 4], mode="weak"))
    assert [study_size.job.recipe.global_batch_size for study_size in made.values()] == [8, 16]


def test_a_rule_that_refuses_a_batch_does_not_stop_a_study_of_speed():
    flags = {
        "optimizer.name": "adamw",
        "optimizer.rule": "adam",
        "optimizer.reference_batch_size": 8,
        "schedule.warmup": "60 steps",
    }
    question = StudyOptions(world_sizes=[1, 16], mode="weak")
    made = study_sizes(question, **flags)
    assert made["w016-b128-m8-ddp"].job.recipe.global_batch_size == 128
    with pytest.raises(UsageError):
        study_sizes(
            StudyOptions(world_sizes=[1, 16], mode="weak", to_target=True),
            **flags,
            **{"stop.at": "val/loss <= 1", "evaluation.every": "1 epoch"},
        )


def test_given_shares_are_those_of_their_number_of_workers_and_one_worker_has_all():
    made = study_sizes(StudyOptions(world_sizes=[1, 2]), **{"shares.by": "given", "shares.speeds": [3, 1]})
    assert [study_size.job.recipe.worker_shares for study_size in made.values()] == [None, (6, 2)]


def test_strategies_that_meet_now_and_then_are_measured_in_whole_periods():
    made = study_sizes(StudyOptions(world_sizes=[1, 2]), **{"strategy.name": "local_sgd", "local_sgd.sync_every": 6})
    assert {r.workers: r.period for r in made.values()} == {1: 1, 2: 6}


@pytest.mark.parametrize(
    ("question", "flags", "words"),
    [
        ({"world_sizes": []}, {}, "--world-sizes"),
        ({"world_sizes": [0, 1]}, {}, "from 1"),
        ({"mode": ["sideways"]}, {}, "strong, weak, or both"),
        ({"mode": []}, {}, "strong, weak, or both"),
        ({"repeats": 0}, {}, "1 to 1000"),
        ({"world_sizes": [1, 3]}, {}, "nearest: 6 or 9"),
        ({"world_sizes": [3, 4], "mode": ["weak"]}, {}, "multiple of 3"),
        (
            {"world_sizes": [1, 64], "mode": ["weak"]},
            {},
            r"--world-sizes is 64: with --mode weak, the training data has 400 samples: .* needs 512",
        ),
        ({"to_target": True}, {}, "--to-target needs a target"),
        ({}, {"shares.by": "speed"}, "before shares settle"),
        ({"world_sizes": [1, 2, 3]}, {"shares.by": "given", "shares.speeds": [2, 1]}, "measure 1 and 2 workers"),
        ({}, {"memory.find_micro_size": True, "memory.limit_gib": 1.0}, "batch.micro_size"),
        ({"world_sizes": [1, 4]}, {"batch.micro_size": 3}, "must divide the 8 samples"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_way_out(question, flags, words):
    with pytest.raises(UsageError, match=words):
        study_sizes(StudyOptions(**question), **flags)


# room for the workers


class Sleeping(Classify):
    def build_model(self):
        from scaleray.emulation import EmulatedLayer, Timing

        return EmulatedLayer(6, Timing())


def test_more_workers_than_cores_need_an_emulated_model_or_the_users_word(monkeypatch):
    monkeypatch.setattr(study_places.psutil, "cpu_count", lambda: 2)

    def room(sizes, workload, **more):
        return study_places.find_room(config(), sizes, workload, None, **{"oversubscribe": False, **more})

    assert room([1, 2], Classify()) == study_places.Room([1, 2], False)
    with pytest.raises(ClusterError, match="this machine has 2 cores") as caught:
        room([1, 3], Classify())
    assert "--oversubscribe" in caught.value.hint and "emulat" in caught.value.hint
    assert room([1, 3], Classify(), oversubscribe=True) == study_places.Room([1, 3], True)
    assert room([1, 3], Sleeping()) == study_places.Room([1, 3], True)


def test_sizes_beyond_the_cores_are_left_out_where_the_others_make_a_curve(monkeypatch):
    monkeypatch.setattr(study_places.psutil, "cpu_count", lambda: 2)
    found = study_places.find_room(config(), [8, 1, 4, 2], Classify(), None, oversubscribe=False)
    assert (found.sizes, found.shares_cores) == ([1, 2], False)
    assert found.left_out.startswith("Refused: 4 and 8 workers, as this machine has 2 cores")
    assert "--oversubscribe" in found.left_out


def test_cores_are_those_that_a_machine_has_whatever_ray_was_told(monkeypatch):
    monkeypatch.setattr(study_places.psutil, "cpu_count", lambda: 2)
    here = next(iter(study_places.psutil.net_if_addrs().values()))[0].address
    nodes = [Node(here, {"CPU": 6.0}, {}), Node("10.255.0.1", {"CPU": 32.0}, {})]
    assert study_places.num_cores(nodes) == 2 + 32


def test_workers_that_share_cores_ask_ray_for_less_of_one():
    nodes = [Node("10.255.0.1", {"CPU": 3.0}, {})]
    made = study_places.launch_config(config(), study_places.Room([16], True), nodes)
    assert (made.scale.workers, made.scale.cpus_per_worker) == (16, 0.12)
    with pytest.raises(ClusterError, match="--world-sizes"):
        study_places.launch_config(config(), study_places.Room([16], False), nodes)
