"""Time to a target: throughput and the worth of a sample together, checkpoints and interruptions counted, the frontier undominated."""

import math
from dataclasses import replace

import pytest

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError
from scaleray.planner.answers.advise import advise
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.answers.to_target import FACTORS, Target, best_way, ways_to
from scaleray.planner.cost.checkpoint_stalls import checkpoint_cost
from scaleray.planner.models.names import find_model
from scaleray.records.study_record import Estimate

QUESTION = Question(
    model=find_model("gpt2"), cluster=parse_cluster("h100:8x2,price=2"), global_batch=256, strategies=("ddp", "zero1")
)


def target(noise_scale, *, trusted=lambda batch: True):
    def samples(batch):
        worth = 1.0 if math.isinf(noise_scale) else (noise_scale + batch) / (noise_scale + 256)
        return Estimate(1e6 * worth, 0.9e6 * worth, 1.1e6 * worth)

    return Target(samples=samples, is_trusted=trusted, words="made up")


def test_every_batch_on_every_size_is_a_way_and_the_frontier_is_beaten_by_none():
    ways = ways_to(target(1000.0), QUESTION)
    assert {way.batch_size for way in ways if way.num_gpus == 16} == {round(256 * factor) for factor in FACTORS}
    assert {1, 2, 4, 8, 16, 32} <= {way.num_gpus for way in ways}
    assert [way.hours.value for way in ways] == sorted(way.hours.value for way in ways)
    for way in ways:
        beaten = any(
            other.hours.value <= way.hours.value and other.gpu_hours <= way.gpu_hours and other is not way
            for other in ways
        )
        assert way.is_on_frontier != beaten
        assert way.hours.low < way.hours.value < way.hours.high
        assert way.gpu_hours == pytest.approx(way.hours.value * way.num_gpus) and way.cost == pytest.approx(
            2 * way.gpu_hours
        )
        assert way.hours.value * 3600 == pytest.approx(way.samples.value / way.choice.samples_per_s)


def test_noise_decides_the_batch():
    # without noise a sample in a larger batch is worth less; where there is nothing but noise, throughput alone counts
    quiet, noisy = (
        best_way(ways_to(target(scale), QUESTION, all_sizes=False), num_gpus=16) for scale in (1.0, math.inf)
    )
    fastest = max(
        (advise(replace(QUESTION, global_batch=round(256 * factor))).best for factor in FACTORS),
        key=lambda one: one.samples_per_s,
    )
    assert quiet.batch_size < noisy.batch_size == fastest.layout.global_batch
    assert noisy.steps == pytest.approx(1e6 / noisy.batch_size)


def test_a_batch_at_which_the_noise_is_known_is_preferred():
    known = best_way(ways_to(target(1.0, trusted=lambda batch: batch >= 256), QUESTION, all_sizes=False), num_gpus=16)
    assert known.batch_size == 256 and known.is_trusted


def test_checkpoints_and_interruptions_lengthen_the_way():
    plain = best_way(ways_to(target(1000.0), QUESTION, all_sizes=False), num_gpus=16)
    cluster = replace(QUESTION.cluster, gpu_mtbf_hours=100.0, storage_gb_per_s=1.0)
    held_up = best_way(ways_to(target(1000.0), replace(QUESTION, cluster=cluster), all_sizes=False), num_gpus=16)
    ratio = checkpoint_cost(QUESTION.model, held_up.choice.layout, cluster).time_ratio
    assert plain.time_ratio == 1.0 and held_up.time_ratio == ratio < 1
    assert held_up.hours.value == pytest.approx(plain.hours.value / ratio)


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match="fits"):
        ways_to(target(1000.0), replace(QUESTION, model=find_model("llama-3-405b")))
