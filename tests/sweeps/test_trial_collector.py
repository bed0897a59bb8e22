"""How a trial's record is made of what Ray Tune reports: stopped, lost, taken up again, or with another trial's config."""

from __future__ import annotations

import math

import pytest
from test_sweep_plan import base, plan_of

from scaleray.sweeps.search_space import LEARNING_RATE


class TuneTrial:
    """What the collector reads of Tune's own."""

    def __init__(self, number, *, error=None, checkpoint=None):
        self.trial_id, self.config, self.checkpoint = f"t{number}", {"number": number}, checkpoint
        self.error = error

    def get_error(self):
        return self.error


def result(plan, trial, *, points, status="", error="", rate=None, began_at=100.0, now=101.0):
    settings = dict(plan.candidates[trial.config["number"]])
    if rate is not None:
        settings[LEARNING_RATE] = rate
    return {
        "value": points[-1][2] if points and not error else math.nan,
        "samples": points[-1][0] if points else 0,
        "seconds": points[-1][1] if points else 0.0,
        "evaluation": len(points),
        "status": status,
        "done": bool(status),
        "detail": {
            "points": [(*point, now) for point in points],
            "settings": settings,
            "error": error,
            "samples_per_s": 10.0,
            "noise_scale": None,
            "noise_interval": None,
            "noise": None,
            "began_at": began_at,
            "now": now,
        },
    }


@pytest.fixture
def collected():
    from scaleray.sweeps.trial_collector import TrialCollector

    plan, _ = plan_of(
        base(**{"stop.at": "val/loss <= 0.1"}), batch_sizes="8,16", learning_rates="0.1,0.2", search="grid"
    )
    trials = []
    return plan, TrialCollector(plan, trials.append), trials


def report(collector, trial, values):
    collector.on_trial_result(0, [], trial, values)


def test_a_trial_that_ends_has_its_curve_and_status(collected):
    plan, collector, trials = collected
    trial = TuneTrial(1)
    collector.on_trial_start(0, [], trial)
    report(collector, trial, result(plan, trial, points=[(16, 0.5, 0.4)]))
    report(collector, trial, result(plan, trial, points=[(32, 1.0, 0.05)], status="target reached", now=103.0))
    collector.on_trial_complete(0, [], trial)
    (found,) = trials
    assert found.number == 1 and found.status == "target reached"
    assert found.curve == [(16, 0.5, 0.4), (32, 1.0, 0.05)]
    assert (found.recorded_at, found.ended_at) == ([101.0, 103.0], 103.0)
    assert (found.samples_to_target, found.time_to_target_s, found.total_time_s) == (32, 1.0, 3.0)
    assert collector.done == {1}


def test_one_without_a_status_was_stopped_by_its_scheduler(collected):
    plan, collector, trials = collected
    trial = TuneTrial(0)
    report(collector, trial, result(plan, trial, points=[(16, 0.5, 0.4)]))
    collector.on_trial_complete(0, [], trial)
    assert trials[0].status == "stopped early" and trials[0].value == 0.4


def test_a_population_copies_the_config_of_the_better_trial_but_not_its_number(collected):
    plan, collector, trials = collected
    trial = TuneTrial(0)
    collector.on_trial_start(0, [], trial)
    report(collector, trial, result(plan, trial, points=[(16, 0.5, 0.9)], rate=0.1))
    trial.config = {"number": 3}  # as Tune's _exploit does
    collector.on_trial_start(0, [], trial)
    report(
        collector,
        trial,
        result(plan, trial, points=[(32, 1.0, 0.3)], rate=0.24, status="target missed", began_at=200.0, now=204.0),
    )
    collector.on_trial_complete(0, [], trial)
    (found,) = trials
    assert found.number == 0 and collector.done == {0}
    assert found.settings["mutations"] == ["learning rate 0.1 -> 0.24 before evaluation 1"]
    assert found.curve == [(16, 0.5, 0.9), (32, 1.0, 0.3)]
    assert found.total_time_s == 5.0  # a second before it was set aside, four after


def test_one_that_begins_again_after_its_process_was_lost_keeps_nothing_of_the_first_time(collected):
    plan, collector, trials = collected
    trial = TuneTrial(2)
    report(collector, trial, result(plan, trial, points=[(16, 0.5, 0.9)]))
    collector.on_trial_recover(0, [], trial)
    report(collector, trial, result(plan, trial, points=[(16, 0.6, 0.8)], status="target missed"))
    collector.on_trial_complete(0, [], trial)
    assert trials[0].curve == [(16, 0.6, 0.8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "its process was lost"),
        ("Failure # 1\nTraceback\n  File x\nscaleray.launch.trial_workers.LostWorkersError: rank 1 was lost: gone", "rank 1 was lost: gone"),
        ("The actor died. Worker exit type: SYSTEM_ERROR Worker exit detail: killed by the OOM killer. Some common causes: many", "its process ended (SYSTEM_ERROR: killed by the OOM killer)"),
    ],
)  # fmt: skip
def test_a_lost_process_is_said_in_a_line(collected, text, said):
    _, collector, trials = collected
    trial = TuneTrial(0, error=text)
    collector.on_trial_error(0, [], trial)
    assert (trials[0].status, trials[0].error) == ("failed", said)
    assert trials[0].batch_size == 8 or trials[0].batch_size == 16


def test_a_diverged_trial_has_no_value(collected):
    plan, collector, trials = collected
    trial = TuneTrial(0)
    report(
        collector, trial, result(plan, trial, points=[(16, 0.5, 0.9)], status="diverged", error="the loss became nan")
    )
    collector.on_trial_complete(0, [], trial)
    assert (trials[0].status, trials[0].value, trials[0].error) == ("diverged", None, "the loss became nan")
