"""Series that a run has once."""

import pytest

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.state.run_series import LINKS_KEPT_S, RunSeries
from scaleray.live.state.run_state import RunState
from scaleray.profiling.goodput import GoodputLedger
from scaleray.records.profile_record import Goodput
from scaleray.records.published import CountedFlops, LinksMeasured, PublishedFacts, RankSample
from scaleray.records.run_record import CheckpointRecord, EvaluationRecord, EventRecord, Heartbeat, StepRecord


def step(number, **more):
    values = {
        "step": number, "loss": 2.0, "count": 8.0, "num_samples": 8, "learning_rate": 0.1, "grad_norm": 0.5,
        "step_time_s": 0.5, "input_wait_s": 0.1, "epoch": number / 10, "recorded_at": 1000.0 + number,
    }  # fmt: skip
    return StepRecord(**{**values, **more})


def run_of(facts=None, *messages, tokens_per_sample=None, ledger=None, **options):
    facts = facts or PublishedFacts()
    state = RunState(tokens_per_sample=tokens_per_sample, flops_per_sample=facts.flops_per_sample, ledger=ledger)
    for message in messages:
        state.take(message)
    return RunSeries(facts, state, run_name="a", run_id="1", **options)


def value(run, metric, facts=None):
    found = [one.value for one in run.of_run(**(facts or {"now": 2000.0})) if one.metric is metric]
    return found[0] if found else None


def test_a_run_without_a_step_says_what_it_is_and_nothing_that_was_not_measured():
    known = {one.metric for one in run_of(None, total_steps=9).of_run(1.0)}
    assert known == {
        live.STEPS, live.STEPS_PLANNED, names.NONFINITE_STEPS, live.RUN_INFO, live.RUN_FINISHED, live.RUN_FAILED
    }  # fmt: skip


def test_rates_are_means_over_the_last_half_minute():
    old, new = [step(n, step_time_s=9.0) for n in (1, 2)], [step(n, recorded_at=1100.0 + n) for n in (3, 4)]
    run = run_of(None, *old, *new, tokens_per_sample=10)
    assert value(run, names.SAMPLES_PER_S) == pytest.approx(16.0)
    assert value(run, names.TOKENS_PER_S) == pytest.approx(160.0)
    assert value(run, names.INPUT_WAIT_SHARE) == pytest.approx(0.2)


def test_a_prediction_is_what_efficiency_is_held_against():
    run = run_of(PublishedFacts(expected_samples_per_s=32.0), step(1))
    assert value(run, live.EXPECTED_SAMPLES_PER_S) == 32.0
    assert value(run, live.EFFICIENCY_OVER_PREDICTION) == pytest.approx(0.5)
    assert value(run_of(None, step(1)), live.EFFICIENCY_OVER_PREDICTION) is None


def test_mfu_needs_the_flops_of_a_sample_and_the_peak_of_the_devices():
    facts = PublishedFacts(flops_per_sample=1e12, peak_flops_per_s=16e12)
    assert value(run_of(facts, step(1, world_size=2)), live.MFU) == pytest.approx(0.5)
    assert value(run_of(PublishedFacts(flops_per_sample=1e12), step(1)), live.MFU) is None
    by_name = run_of(PublishedFacts(flops_per_sample=1e12), step(1), peak_of={"a GPU": 32e12}.get)
    by_name.state.take(RankSample(0, "n", 1, 1, 1.0, device="a GPU"))
    assert value(by_name, live.MFU) == pytest.approx(0.5)
    counted = run_of(PublishedFacts(peak_flops_per_s=16e12), step(1))
    assert value(counted, live.MFU) is None
    counted.state.take(CountedFlops(5e11))
    assert value(counted, live.MFU) == pytest.approx(0.5)


def test_steps_are_the_newest_one_and_repeated_ones_do_not_go_back():
    run = run_of(None, *(step(n) for n in (1, 2, 3)), EventRecord("", kind="resumed", step=1), step(2))
    assert value(run, live.STEPS) == 3


def test_the_use_of_time_is_that_of_the_ledger():
    class Told(GoodputLedger):
        def goodput(self, now):
            return Goodput(10.0, {"productive": 4.0}, attempts=2, repeated_steps=1)

    run = run_of(None, step(1), ledger=Told(0.0))
    assert value(run, live.STEPS_REPEATED) == 1 and value(run, live.RESTARTS) == 1
    assert value(run, names.GOODPUT) == pytest.approx(0.4)


def test_a_message_that_came_twice_counts_once():
    run = run_of(None, step(1, sent_bytes=7.0), step(1, sent_bytes=7.0), step(2, sent_bytes=7.0))
    assert value(run, live.SENT_BYTES_TOTAL) == 14.0


def test_lost_workers_samples_are_forgotten():
    run = run_of(None, RankSample(0, "n", 1, 1, 1.0), EventRecord("", kind="resumed", step=1))
    assert run.of_ranks() == []


def test_a_checkpoint_has_an_age_where_any_are_made():
    facts = PublishedFacts(checkpoint_every_steps=10, checkpoint_every_s=600.0)
    run = run_of(facts, step(1), step(200))
    assert value(run, live.CHECKPOINT_AGE_S) == pytest.approx(199.0), "since the first step, before there is one"
    assert value(run, live.CHECKPOINT_INTERVAL_S) == pytest.approx(5.0)
    assert value(run, names.CHECKPOINT_DURATION_S) is None
    run.state.take(CheckpointRecord(1, "p", 1, 1, 4.0, 0.1, recorded_at=1194.0))
    assert value(run, live.CHECKPOINT_AGE_S) == pytest.approx(10.0), "what it holds is as old as its beginning"
    assert value(run, names.CHECKPOINT_DURATION_S) == 4.0
    assert value(run_of(None, step(1)), live.CHECKPOINT_AGE_S) is None


def test_a_checkpoint_grows_older_by_training_and_by_waiting_for_the_next_one_alone():
    run = run_of(PublishedFacts(checkpoint_every_s=60.0), step(1), step(30))
    age = live.CHECKPOINT_AGE_S
    run.state.take(CheckpointRecord(30, "p", 1, 1, 1.0, 0.1, recorded_at=1021.0))
    assert value(run, age, beating("evaluation", 1500.0)) == pytest.approx(10.0), "nothing more could be lost"
    run.state.take(EvaluationRecord(30, {}, 460.0, recorded_at=1490.0))
    run.state.take(step(31, recorded_at=1491.0))
    assert value(run, age, beating("backward", 1800.0)) == pytest.approx(11.0), "a hang loses no more either"
    assert value(run, age, beating("checkpoint", 1531.0)) == pytest.approx(51.0), "a next one that does not come"
    run.state.take(EventRecord("", kind="resumed", step=30, recorded_at=1900.0))
    run.state.take(step(31, recorded_at=1907.0))
    assert value(run, age) == pytest.approx(7.0), "it goes on from that one"


def beating(phase, now, since_s=1.0, silent_s=0.0):
    """What is known beside the messages, while the first worker is in a phase and the second one waits."""
    beats = [Heartbeat(0, "a", 1, 5, phase, since_s, silent_s=silent_s), Heartbeat(1, "a", 2, 5, "backward", since_s)]
    return {"now": now, "beats": beats}


def test_a_run_says_when_it_was_last_at_what_rightly_takes_long():
    run, when = run_of(None, step(1), long_phase_s=60.0), live.LONG_PHASE_TIMESTAMP_S
    assert value(run, when, beating("backward", 2000.0)) is None
    assert value(run, when, beating("evaluation", 2010.0)) == 2010.0
    (one,) = [one for one in run.of_run(**beating("checkpoint", 2020.0, silent_s=3.0)) if one.metric is when]
    assert (one.value, one.labels["phase"]) == (2017.0, "checkpoint"), "when its sign of life came"
    for phase, since_s, silent_s in (("forward", 1, 0), ("evaluation", 61, 0), ("evaluation", 40, 30)):
        assert value(run, when, beating(phase, 2100.0, since_s, silent_s)) == 2017.0, "a step, or too long for one"


def test_an_evaluation_is_split_into_its_labels():
    run = run_of(None, EvaluationRecord(1, {"val/top/5": 0.9}, 0.1))
    (found,) = [one for one in run.of_run(1.0) if one.metric is live.EVAL]
    assert (found.labels["split"], found.labels["metric"], found.value) == ("val", "top/5", 0.9)


@pytest.mark.parametrize(
    ("status", "marks"), [("", (0, 0)), ("FINISHED", (1, 0)), ("KILLED", (1, 0)), ("FAILED", (0, 1))]
)
def test_a_run_that_has_ended_is_marked(status, marks):
    facts = {"now": 1.0, "status": status}
    run = run_of()
    assert (value(run, live.RUN_FINISHED, facts), value(run, live.RUN_FAILED, facts)) == marks


def test_links_that_were_measured_are_told_of_for_some_minutes_by_the_slowest_one_alone():
    run = run_of(None, LinksMeasured(9, "1", "2", 5e6, 1e8, recorded_at=1900.0))
    found = {one.metric: one for one in run.of_run(2000.0)}
    slowest, ratio = found[live.SLOWEST_LINK_BYTES_PER_S], found[live.SLOWEST_LINK]
    assert (slowest.value, ratio.value) == (5e6, pytest.approx(0.05))
    assert (ratio.labels["source"], ratio.labels["to"]) == ("1", "2") and slowest.labels == ratio.labels
    assert value(run, live.SLOWEST_LINK, {"now": 1901.0 + LINKS_KEPT_S}) is None
    run.state.take(LinksMeasured(20, "0", "1", 5e6, None, recorded_at=2000.0))
    assert value(run, live.SLOWEST_LINK) is None, "of one link nothing can be said"
    assert value(run, live.SLOWEST_LINK_BYTES_PER_S) == 5e6
