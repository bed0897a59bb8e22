"""From turns to points: parts that add up, periods, marks, cost and MFU."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import DEFAULTS

from scaleray.config import load_config
from scaleray.errors import RunFailedError
from scaleray.records.study_record import Repeat
from scaleray.records.workload_profile import WorkloadProfile
from scaleray.studies.measure_sizes import StudySize
from scaleray.studies.point import NOT_STEADY, cost_per_million_samples, periods, point_of, split

RECIPE = SimpleNamespace(strategy="ddp", global_batch_size=64, micro_batch_size=32, accumulation_steps=1)
UNKNOWN = "nobody has counted"
PROFILE = WorkloadProfile(
    num_parameters=1, num_trained_parameters=1, parameter_bytes=4, precision="fp32", backward_flops=1e5,
    activation_bytes=0.0, fixed_activation_bytes=0.0, count_per_sample=None,
)  # fmt: skip


def as_point(mode, workers, turns, *, tokens=None, flags=None, profile=UNKNOWN, **more):
    job = SimpleNamespace(recipe=RECIPE, splits={"train": SimpleNamespace(tokens_per_row=tokens)})
    study_size = StudySize(name="one", workers=workers, job=job, num_turns=len(turns), turns=turns, **more)
    config = load_config(flags={**DEFAULTS, **(flags or {})}, environ={})
    return point_of(mode, study_size, config, profile=profile, study="mine")


def turn(times, **more):
    return Repeat(
        **{
            "step_times_s": times,
            "input_waits_s": [0.0] * len(times),
            "input_share": 0.0,
            "measured_at": 1.0,
            "study": "mine",
            **more,
        }
    )


def steady(step_time_s, num=60):
    return [step_time_s * (1 + 0.001 * (number % 3)) for number in range(num)]


@settings(max_examples=60)
@given(
    step=st.floats(1e-4, 10),
    alone=st.floats(0, 20),
    slower=st.floats(0, 5),
    wait=st.floats(0, 1),
    workers=st.integers(2, 64),
)
def test_the_parts_of_a_step_are_never_negative_and_add_up_to_it(step, alone, slower, wait, workers):
    found = split(step, turn([step], alone_s=alone, slowest_alone_s=alone + slower, input_share=wait), workers)
    parts = (found.compute, found.comm, found.input, found.other)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(1.0)


def test_what_the_same_work_takes_alone_is_computing_and_the_rest_is_communication():
    found = split(0.010, turn([0.010], alone_s=0.006, slowest_alone_s=0.007, input_share=0.1), 4)
    assert (found.compute, found.other, found.input, found.comm) == pytest.approx((0.6, 0.1, 0.1, 0.2))


def test_one_worker_communicates_nothing_and_a_worker_that_cannot_work_alone_cannot_tell():
    assert split(0.01, turn([0.01]), 1).comm == 0.0
    assert split(0.01, turn([0.01]), 2).comm is None
    point = as_point("strong", 2, [turn(steady(0.01))])
    assert point.exposed_comm_s is None and point.compute_s == pytest.approx(point.step_time_s.value)


def test_a_point_adds_up_and_counts_samples_and_tokens_of_the_global_batch():
    turns = [
        turn(steady(0.01), alone_s=0.008, slowest_alone_s=0.0085, sent_bytes=100.0, peak_memory_bytes=n, study="other")
        for n in (1, 3)
    ]
    point = as_point("weak", 4, turns, tokens=10, marks=["relaunched"])
    t = point.step_time_s.value
    assert point.compute_s + point.exposed_comm_s + point.input_wait_s + point.other_s == pytest.approx(t)
    assert point.samples_per_s.value == pytest.approx(64 / t)
    assert point.tokens_per_s.value == pytest.approx(640 / t)
    assert (point.peak_memory_bytes, point.sent_bytes, point.marks, point.reused_from) == (
        3,
        100.0,
        ["relaunched"],
        "other",
    )
    assert [len(steps) for steps in point.turns] == [60 - point.num_warmup_steps] * 2


def test_a_slow_start_is_left_out():
    point = as_point("strong", 1, [turn([1.0] * 10 + steady(0.01, 90))])
    assert point.num_warmup_steps >= 10
    assert point.step_time_s.value == pytest.approx(0.01, rel=0.01)
    assert point.marks == []


def test_a_point_is_marked_when_half_of_its_turns_drift():
    drifting, good = turn([0.01 * (1 + 0.01 * number) for number in range(100)]), turn(steady(0.01, 100))
    assert as_point("strong", 1, [good, drifting]).marks == [NOT_STEADY]
    assert as_point("strong", 1, [good, good, drifting], marks=["relaunched"]).marks == ["relaunched"]


def test_emulated_workers_need_no_core_and_so_are_not_marked_for_sharing_one():
    for is_emulated, marks in ((True, ["emulated", "relaunched"]), (False, ["oversubscribed", "relaunched"])):
        turns = [turn(steady(0.01), is_emulated=is_emulated)]
        assert as_point("strong", 2, turns, marks=["oversubscribed", "relaunched"]).marks == marks


def test_averagings_now_and_then_belong_to_every_step():
    times = [0.01, 0.01, 0.01, 0.05] * 30  # the median step alone would know nothing of the averaging
    point = as_point("strong", 2, [turn(times)], period=4)
    assert point.step_time_s.value == pytest.approx(0.02)


@settings(max_examples=40)
@given(times=st.lists(st.floats(0.001, 10), min_size=1, max_size=50), period=st.integers(1, 7))
def test_periods_keep_the_mean_of_the_steps_that_fill_them(times, period):
    found = periods(times, period)
    assert len(found) == len(times) // period
    if found:
        assert statistics.fmean(found) == pytest.approx(statistics.fmean(times[len(times) % period :]))


def test_cost_is_price_times_worker_time():
    # 2 workers at 3 an hour are 6 an hour; a million samples at 1000/s take 1000 s
    assert cost_per_million_samples(1000.0, 2, 3.0) == pytest.approx(6 * 1000 / 3600)
    assert cost_per_million_samples(1000.0, 2, None) is None


def test_mfu_is_the_share_of_the_workers_peaks_and_no_more_than_all_of_it():
    def measured(peak_tflops):
        return as_point("strong", 2, [turn(steady(0.01))], flags={"study.peak_tflops": peak_tflops}, profile=PROFILE)

    point = measured(1e-3)
    assert point.mfu == pytest.approx(point.samples_per_s.value * 1e5 / 2e9)
    with pytest.raises(RunFailedError, match=r"study\.peak_tflops"):
        measured(1e-6)
