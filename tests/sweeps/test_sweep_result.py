"""What a sweep found in sentences, from trials whose steps and samples follow a known law."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from scaleray.records.study_record import Conditions
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.records.text.headlines import sweep_headline
from scaleray.sweeps.result import common_causes, find_knee, rule_range, sentences, with_common_target
from scaleray.training.noise.statistical_efficiency import TradeOff

TARGET = "val/loss <= 0.1"


def trial(
    batch_size, *, number=0, samples=None, rule="linear", rate=0.1, seed=0, value=0.05, status="", error="", **more
):
    """One that reached the target after so many samples, a thousand of them a second, or missed it."""
    status = status or ("target reached" if samples is not None else "target missed")
    return Trial(
        number=number,
        status=status,
        batch_size=batch_size,
        rule=rule,
        learning_rate=rate,
        optimizer="sgd",
        warmup="0 steps",
        seed=seed,
        workers=2,
        metric="val/loss",
        value=value,
        samples_to_target=samples,
        time_to_target_s=samples / (1000 * batch_size**0.5) if samples is not None else None,
        samples=samples or 9999,
        settings={"seed": seed},
        error=error,
        **more,
    )


def record(trials, *, target=TARGET, direction="min", **config):
    conditions = Conditions(config_hash="c", code_hash="c", environment_hash="e", topology_hash="t")
    return SweepRecord(
        name="s",
        command="scaleray sweep",
        config=config,
        conditions=conditions,
        metric="val/loss",
        direction=direction,
        target=target,
        scheduler="fifo",
        search="grid",
        trials=[dataclasses.replace(t, number=n) for n, t in enumerate(trials)],
        started_at=0.0,
        duration_s=1.0,
    )


def lawful(critical, sizes, *, least=6400.0):
    """Trials whose samples to the target follow E = E_min (1 + B / B_crit)."""
    return [trial(size, samples=round(TradeOff(least / critical, least).samples(size))) for size in sizes]


def said(found, **options):
    return "\n".join(sentences(found, **{"has_own_target": True, "reference_batch_size": 32, **options}))


@hypothesis_settings(max_examples=40)
@given(critical=st.floats(20, 5000))
def test_the_knee_is_the_critical_batch_size_of_the_law(critical):
    knee = find_knee(record(lawful(critical, [32, 64, 128, 256, 512, 1024], least=64000.0)))
    assert knee.batch_size == pytest.approx(critical, rel=0.02)  # samples are whole numbers


@pytest.mark.parametrize(("critical", "where"), [(200, "within"), (9000, "above"), (8, "below")])
def test_the_knee_says_where_it_lies(critical, where):
    found = record(lawful(critical, [32, 64, 128, 256, 512]))
    assert find_knee(found).where == where
    words = {
        "within": "The knee is at a batch of about 20",
        "above": "The knee lies above 32 to 512",
        "below": "The knee lies below 32 to 512",
    }
    assert words[where] in said(found)


def test_one_size_or_none_that_reached_the_target_has_no_knee():
    assert find_knee(record([trial(32, samples=100), trial(64)])) is None
    assert find_knee(record([])) is None


def test_the_fastest_and_the_cheapest_are_named_with_their_settings():
    text = said(record(lawful(200, [32, 64, 128, 256, 512])))
    assert "Fastest: batch 128 " in text or "Fastest: batch 256 " in text
    assert "Cheapest: batch 32 with sgd, learning rate 0.1 (the reference, where all rules agree)" in text
    assert "7,424 samples" in text  # 6400 (1 + 32 / 200)


def test_other_keys_that_vary_are_named_with_a_setting():
    first = dataclasses.replace(trial(64, samples=10), settings={"seed": 0, "strategy.name": "fsdp"})
    second = dataclasses.replace(trial(64, samples=20), settings={"seed": 0, "strategy.name": "ddp"})
    assert "batch 64 with sgd, learning rate 0.1 (rule linear, strategy.name fsdp)" in said(record([first, second]))


def test_one_setting_can_be_both():
    text = said(record([trial(32, samples=1000), trial(64, samples=9000)]))
    assert "Fastest and cheapest: batch 32" in text
    assert "Cheapest:" not in text


def test_the_headline_and_the_sentence_agree_if_the_faster_of_two_needs_no_more_samples():
    slower, faster = trial(32, samples=1000, value=0.01), trial(64, samples=1000)
    found = record([slower, faster])
    assert sweep_headline(found).startswith("Batch 64 is fastest and cheapest to ")
    assert "Fastest and cheapest: batch 64" in said(found)


def test_the_fastest_may_have_another_rate_than_the_cheapest_of_its_batch():
    slow, quick = trial(64, samples=1000, rate=0.1), trial(64, samples=1100, rate=0.2)
    slow = dataclasses.replace(slow, time_to_target_s=9.0)
    quick = dataclasses.replace(quick, time_to_target_s=1.0)
    text = said(record([slow, quick]))
    assert "Fastest: batch 64 with sgd, learning rate 0.2 (rule linear)" in text
    assert "Cheapest: batch 64 with sgd, learning rate 0.1" in text


def test_a_rule_stops_holding_at_the_first_batch_that_misses_although_a_later_one_is_lucky():
    trials = [trial(16), trial(32, samples=1), trial(64, samples=1), trial(128), trial(256, samples=1)]
    found = rule_range(record(trials), "linear", reference_batch_size=32)
    assert (found.held_up_to, found.missed_at) == (64, 128)
    assert "Rule linear held up to 64 and missed the target at 128. In theory it holds for SGD well below" in said(
        record(trials)
    )


def test_more_than_half_of_the_seeds_must_reach_it():
    seeds = [trial(64, samples=1, seed=0), trial(64, seed=1), trial(64, seed=2)]
    assert rule_range(record([trial(32, samples=1), *seeds]), "linear", reference_batch_size=32).missed_at == 64
    more = [*seeds[:2], trial(64, samples=1, seed=2)]
    assert rule_range(record([trial(32, samples=1), *more]), "linear", reference_batch_size=32).missed_at is None


def test_the_adam_rule_is_refused_where_theory_says():
    refused = "optimizer.rule is 'adam', but with betas [0.9, 0.999] it holds for a batch below 10 x the reference."
    trials = [
        trial(32, samples=1, rule="adam"),
        trial(512, rule="adam", status="never fits", error=refused, value=None),
    ]
    text = said(record(trials, optimizer={"betas": [0.9, 0.999]}))
    assert "Rule adam held at every batch size tried, up to 32; it does not exist from 512 up." in text
    assert "In theory it exists below 10 x the reference, a batch of 320" in text


def test_a_diverged_or_failed_setting_has_not_held():
    diverged = trial(64, status="diverged", error="the loss became nan at step 3", value=None)
    failed = trial(128, status="failed", error="no", value=None)
    found = rule_range(record([trial(32, samples=1), diverged, failed]), "linear", reference_batch_size=32)
    assert (found.held_up_to, found.missed_at) == (32, 64)
    assert rule_range(record([trial(32, samples=1), failed]), "linear", reference_batch_size=32).missed_at == 128


def test_trials_that_were_stopped_early_do_not_say_that_a_rule_missed():
    trials = [trial(32, samples=1), trial(64, status="stopped early", value=0.4), trial(128, value=0.4)]
    found = rule_range(record(trials), "linear", reference_batch_size=32)
    assert (found.held_up_to, found.missed_at, found.stopped_at) == (32, None, 64)
    assert "held up to 32; at 64 the scheduler stopped its trials before a result" in said(record(trials))


def test_a_target_that_nobody_reached_is_said_with_the_closest():
    text = said(
        record([trial(32, value=0.3), trial(64, value=0.2), trial(128, value=None, status="failed", error="no")])
    )
    assert f"No setting reached {TARGET} in more than half of its trials; the closest, batch 64" in text
    assert "ended at 0.2. Train longer (stop.after)" in text
    assert "Fastest" not in text and "Rule" not in text


@pytest.mark.parametrize(
    ("direction", "target", "reached"), [("min", "val/loss <= 0.3", {0, 1}), ("max", "val/loss >= 0.3", {1, 2})]
)
def test_without_a_target_half_of_the_trials_reach_the_common_one(direction, target, reached):
    curves = [[(10, 1.0, 0.9), (20, 2.0, 0.1)], [(10, 1.0, 0.5), (20, 2.0, 0.3)], [(10, 1.0, 0.6), (20, 2.0, 0.7)]]
    if direction == "max":
        curves[0] = [(10, 1.0, 0.05), (20, 2.0, 0.1)]
        curves[1] = [(10, 1.0, 0.2), (20, 2.0, 0.3)]
    trials = [trial(32 * 2**n, status="finished", value=curve[-1][2], curve=curve) for n, curve in enumerate(curves)]
    found = with_common_target(record(trials, target=None, direction=direction))
    assert found.target == target
    assert {t.number for t in found.trials if t.samples_to_target is not None} == reached
    assert "which half of them reached; set stop.at to choose one" in said(found, has_own_target=False)


def test_a_record_with_a_target_or_one_trial_is_left_alone():
    own = record([trial(32, samples=1), trial(64)])
    assert with_common_target(own) is own
    single = record([trial(32, status="finished")], target=None)
    assert with_common_target(single) is single


def test_causes_are_counted_once_each():
    bad = [trial(32, status="failed", error="A\nmore", value=None), trial(64, status="failed", error="A", value=None)]
    bad += [trial(64, status="diverged", error="B", value=None), trial(64, status="never fits", error="C", value=None)]
    assert common_causes(bad) == [("A", 2), ("B", 1)]
    text = said(record([*bad, trial(16, samples=5)]))
    assert "Failed: 2 of 5: A" in text and "Not started: 1 of 5, as C" in text


@pytest.mark.parametrize(("apart", "is_coarse"), [(100, False), (900, True)])
def test_evaluations_far_apart_are_said(apart, is_coarse):
    curve = [(n * apart, float(n), 0.5 / n) for n in (1, 2, 3)]
    text = said(record([trial(32, samples=2000, curve=curve), trial(64, samples=2400, curve=curve)]))
    assert (f"Evaluations are {apart} samples apart, 41%" in text) == is_coarse


def test_a_sweep_in_tokens_says_what_its_samples_are_and_finds_its_reference():
    trials = [
        dataclasses.replace(trial(size, samples=1000 * size), settings={"seed": 0, "batch.global_size": tokens})
        for tokens, size in ((1000, 30), (2000, 60), (4000, 118))
    ]
    trials.append(dataclasses.replace(trial(9, status="never fits"), settings={"batch.global_size": 9}))
    given = {"batch": {"unit": "tokens", "global_size": 2000}, "optimizer": {"reference_batch_size": 1000}}
    found = record(trials, **given)
    assert found.reference_batch_size == 30
    assert dataclasses.replace(found, config={**given, "optimizer": {}}).reference_batch_size == 60
    words = " ".join(sentences(found, has_own_target=True, reference_batch_size=30))
    assert "30 samples are 1000 tokens, 60 samples are 2000 tokens, 118 samples are 4000 tokens." in words
    plain = record(trials, batch={"unit": "samples", "global_size": 64})
    assert plain.reference_batch_size == 64 and not plain.asked_sizes
