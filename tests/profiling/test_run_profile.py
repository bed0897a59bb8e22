"""The profile of a run, from what its workers have measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scaleray.profiling.run_profile import run_profile, steps_in_buckets
from scaleray.records.profile_record import Goodput, RankMeasurements, RunProfile
from scaleray.training.profile.phase_times import StepRows


def measured(rank=0, *, parts=(0.01, 0.02), num_steps=500, gap=0.0, **more):
    table = StepRows(("step", "input", "forward", "evaluation"))
    steps = np.array([[sum(parts), *parts, 0.0]] * num_steps).reshape(-1, 4)
    table.add(steps)
    return RankMeasurements(
        rank=rank,
        node="here",
        device="cpu",
        first_step=2,
        num_steps=num_steps,
        columns=table.columns,
        every=table.every,
        rows=table.rows,
        totals=table.totals,
        series=table.series,
        bucket_width=table.bucket_width,
        worst_gap=gap,
        gap=gap,
        **more,
    )


def test_phases_are_told_by_step_and_over_time_and_those_without_time_are_left_out():
    profile = run_profile([measured(1, num_steps=499), measured(0)])
    assert [one.rank for one in profile.ranks] == [0, 1]
    first = profile.ranks[0]
    assert list(first.phases) == ["input", "forward"]
    assert first.step.total == pytest.approx(15.0) and first.step.median == pytest.approx(0.03)
    assert first.phases["input"].series == pytest.approx([0.01] * profile.buckets.count)
    # the last bucket has a step less
    assert profile.ranks[1].phases["input"].series[-1] == pytest.approx(0.01)
    assert profile.buckets.width * profile.buckets.count >= 500 and profile.buckets.first_step == 2


def test_a_run_closes_only_if_every_rank_does_and_names_the_worst_one():
    assert run_profile([measured(0, gap=0.001), measured(1, gap=0.009)]).closes
    profile = run_profile([measured(0, gap=0.001), measured(1, gap=0.02), measured(2, gap=0.0)])
    assert not profile.closes and profile.gap == 0.02 and profile.gap_rank == 1
    unknown = dataclasses.replace(measured(1), gap=None)
    assert not run_profile([measured(0), unknown]).closes


def test_without_a_measured_step_there_is_no_profile():
    assert run_profile([]) is None
    assert run_profile([measured(num_steps=0)]) is None


def test_a_profile_is_read_as_it_was_written_and_unknown_keys_do_not_matter():
    profile = run_profile([measured(notes=("no arrivals",))])
    values = dataclasses.asdict(profile)
    values["ranks"][0]["of_a_newer_version"] = 1
    assert RunProfile.of(values) == profile
    assert RunProfile.of(None) is None
    assert RunProfile.of({"ranks": "none"}) is None


def test_the_last_bucket_may_have_fewer_steps():
    assert list(steps_in_buckets(10, 4)) == [4, 4, 2]
    assert list(steps_in_buckets(8, 4)) == [4, 4]


def test_metrics_of_a_profile_are_shares_of_a_step_and_of_the_run():
    goodput = Goodput(20.0, {"productive": 15.0, "start": 5.0})
    found = run_profile([measured(0), measured(1, parts=(0.03, 0.0))], goodput=goodput).figures()
    assert found == {
        "profile/gap": 0.0,
        "profile/goodput": 0.75,
        "profile/input_share": pytest.approx(4 / 6),
        "profile/forward_share": pytest.approx(2 / 6),
    }
