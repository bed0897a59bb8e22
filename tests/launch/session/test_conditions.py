"""When two measurements may stand on one curve."""

from __future__ import annotations

import dataclasses

import pytest
from small_runs import DEFAULTS, Classify

from scaleray.common import fingerprint
from scaleray.config import load_config
from scaleray.errors import ConfigError, StorageError
from scaleray.launch.session.conditions import MOST_DIFFERENCES, check_same, conditions_of, differences, key_of
from scaleray.records.study_record import Repeat, ToTarget
from scaleray.studies.repeat_store import TARGET, TURN, InvalidRepeats, StoredRepeats, mark_invalid, studies_of

NODES = {"launch": "Ray Train", "nodes": [{"cpus": 2, "gpus": 0, "accelerator": None}]}


def conditions(topology=None, **flags):
    config = load_config(flags={**DEFAULTS, **flags}, environ={})
    return conditions_of(config, Classify(), topology or NODES)


@pytest.mark.combination
def test_where_a_study_is_kept_and_on_how_many_workers_do_not_matter():
    plain = conditions()
    for flags in (
        {"scale.workers": 4},
        {"tracking.experiment": "other"},
        {"checkpoint.storage_path": "/elsewhere"},
        {"study.price_per_worker_hour": 3.0},
        {"scale.max_failures": 9},
        {"noise_scale.measure": True},
    ):
        assert differences(plain, conditions(**flags)) == [], flags
    assert key_of(plain) == key_of(conditions())


@pytest.mark.combination
def test_what_decides_the_speed_matters():
    plain = conditions()
    for flags in ({"batch.global_size": 16}, {"precision.dtype": "fp32"}, {"scale.cpus_per_worker": 2.0}, {"seed": 1}):
        found = differences(plain, conditions(**flags))
        assert len(found) == 1 and found[0].startswith("config:"), flags


def test_a_difference_of_environment_or_topology_is_shown_fact_by_fact():
    here = conditions()
    there = dataclasses.replace(here, environment_hash="other", environment={**here.environment, "python": "3.0"})
    assert differences(here, there) == [f"environment: python is {here.environment['python']} here, 3.0 there"]
    with pytest.raises(ConfigError, match=r"the curve of study-1 .*one curve need the same") as caught:
        check_same(here, there, whose="study-1")
    assert "3.0 there" in str(caught.value) and "scaleray compare" in str(caught.value)
    other = conditions({**NODES, "nodes": [{"cpus": 8, "gpus": 0, "accelerator": None}]})
    assert differences(here, other) == ["topology: nodes.0.cpus is 2 here, 8 there"]
    check_same(here, conditions(), whose="itself")


def test_another_config_is_shown_key_by_key_and_other_code_with_its_commit():
    here = conditions()
    there = dataclasses.replace(
        conditions(**{"batch.global_size": 16}),
        code_hash="other",
        environment={**here.environment, "git": {"commit": 40 * "a"}},
    )
    configs = [
        load_config(flags={**DEFAULTS, "batch.global_size": size, "scale.workers": 2}, environ={}).to_dict()
        for size in (8, 16)
    ]
    config, code = differences(here, there, configs=tuple(configs))
    assert config == "config: batch.global_size is 8 here, 16 there"
    assert code.startswith(f"code: {here.code_hash}") and code.endswith(f"other (commit {12 * 'a'}) there")
    assert differences(here, there)[0] == f"config: {here.config_hash} here, {there.config_hash} there"


def test_many_differences_are_counted_rather_than_listed():
    here = conditions()
    there = dataclasses.replace(here, topology_hash="other", topology={f"key {n}": n for n in range(30)})
    with pytest.raises(ConfigError, match="more") as caught:
        check_same(here, there, whose="it")
    assert len(str(caught.value).splitlines()) == MOST_DIFFERENCES + 3


# turns that are kept


def turn(at, study="one"):
    return Repeat(step_times_s=[0.1, 0.2], input_waits_s=[0.0, 0.0], input_share=0.0, measured_at=at, study=study)


def test_turns_come_back_oldest_first_under_the_same_conditions_only(tmp_path):
    known = StoredRepeats(str(tmp_path), conditions())
    for at in (3.0, 1.0, 12.0):
        known.keep("w001", TURN, turn(at), at=at)
    target = ToTarget(is_reached=True, steps=1, samples=2, time_s=3.0, metric="val/loss", value=0.5)
    known.keep("w001", TARGET, target, at=5.0)
    again = StoredRepeats(str(tmp_path), conditions())
    assert again.turns("w001") == [turn(1.0), turn(3.0), turn(12.0)]
    assert again.to_target("w001").samples == 2
    assert again.turns("w002") == [] and again.to_target("w002") is None
    assert StoredRepeats(str(tmp_path), conditions(seed=1)).turns("w001") == []


def test_a_file_that_is_no_turn_counts_as_not_there(tmp_path):
    known = StoredRepeats(str(tmp_path), conditions())
    known.keep("w001", TURN, turn(1.0), at=1.0)
    known.store.write_text("w001/turn-2.000-beef.json", '{"step_times_s": "no"}')
    assert known.turns("w001") == [turn(1.0)]


def test_reused_turns_are_named():
    assert studies_of([turn(1, "a"), turn(2, "a")], own="a") is None
    assert studies_of([turn(1, "a"), turn(2, "b")], own="c") == "a, b"
    assert studies_of([turn(1, "a"), turn(2, "c"), turn(3, "c")], own="c") == "a (1 of 3 measurements)"


def test_a_turn_that_was_changed_on_the_disk_is_refused_with_its_file(tmp_path):
    known = StoredRepeats(str(tmp_path), conditions())
    known.keep("w001", TURN, turn(1.0), at=1.0)
    [name] = known.store.names("w001")
    known.store.write_text(name, known.store.read(name).decode().replace("0.2", "0.1"))
    with pytest.raises(StorageError, match=r"turn-1\.000-.* was changed.*\n.*--force"):
        known.turns("w001")


def test_turns_of_a_study_that_is_invalid_are_not_taken_over_and_stay(tmp_path):
    known = StoredRepeats(str(tmp_path), conditions())
    target = ToTarget(is_reached=True, steps=1, samples=2, time_s=3.0, metric="val/loss", value=0.5)
    for study_size in ("w001-b8", "w002-b8"):
        known.keep(study_size, TURN, turn(1.0, "hot"), at=1.0)
        known.keep(study_size, TURN, turn(50.0, "cool"), at=50.0)
        known.keep(study_size, TARGET, target, at=2.0)
    mark_invalid(str(tmp_path), InvalidRepeats("hot", "the fan was off", 0.0, 10.0, workers=2))
    again = StoredRepeats(str(tmp_path), conditions())
    assert again.turns("w001-b8") == [turn(1.0, "hot"), turn(50.0, "cool")] and again.to_target("w001-b8") == target
    assert again.turns("w002-b8") == [turn(50.0, "cool")] and again.to_target("w002-b8") is None
    mark_invalid(str(tmp_path), InvalidRepeats("hot", "the fan was off", 0.0, 10.0))
    assert StoredRepeats(str(tmp_path), conditions()).turns("w001-b8") == [turn(50.0, "cool")]
    assert len(known.store.names("w002-b8")) == 3


def test_the_commit_is_that_which_a_training_here_would_record(monkeypatch):
    state, asked = {"commit": "c" * 40, "is_dirty": False, "diff_sha256": None}, []
    monkeypatch.setattr(fingerprint, "git_state", lambda folder: asked.append(folder) or state)
    assert conditions().environment["git"] == fingerprint.environment()["git"] == state
    assert asked[0] == asked[1]
