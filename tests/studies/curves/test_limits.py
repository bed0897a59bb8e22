"""What limits a point, and what is advised about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planted_curves import point

from scaleray.config.loading import known_keys
from scaleray.records.study_record import Mode, Point
from scaleray.studies.curves.curves import WORDS, advice, limit_of, lost_shares
from scaleray.studies.curves.efficiency import curve_points


def parts(workers: int, mode: Mode, compute: float, comm: float, wait: float, **more: Any) -> Point:
    batch = 64 * workers if mode == "weak" else 64
    return point(
        workers,
        [[compute + comm + wait] * 12] * 3,
        mode=mode,
        batch=batch,
        compute_s=compute,
        exposed_comm_s=comm,
        input_wait_s=wait,
        **more,
    )


def limit(mode: Mode, base: Point, largest: Point) -> str:
    points = curve_points([base, largest])
    return limit_of(mode, points[0].point, points[1])


@pytest.mark.parametrize(
    ("mode", "largest", "expected"),
    [
        ("strong", (0.25, 0.10, 0.0), "communication"),
        ("strong", (0.25, 0.01, 0.1), "input"),
        ("strong", (0.40, 0.01, 0.0), "compute"),
        ("weak", (1.00, 0.30, 0.0), "communication"),
        ("weak", (1.00, 0.00, 0.2), "input"),
        ("weak", (1.40, 0.05, 0.0), "contention"),
        ("strong", (0.25, 0.002, 0.0), "nothing yet"),
        ("weak", (1.00, 0.02, 0.0), "nothing yet"),
    ],
)
def test_the_limit_is_the_part_that_grew_beyond_the_ideal(
    mode: Mode, largest: tuple[float, float, float], expected: str
):
    assert limit(mode, parts(1, mode, 1.0, 0.0, 0.0), parts(4, mode, *largest)) == expected


def test_workers_that_share_cores_are_contention_in_a_strong_curve_too():
    base, largest = parts(1, "strong", 1.0, 0.0, 0.0), parts(4, "strong", 0.5, 0.0, 0.0, marks=["oversubscribed"])
    assert limit("strong", base, largest) == "contention"
    assert "one worker per core" in advice("contention", largest)


def test_waiting_for_the_slowest_worker_is_contention():
    base = parts(1, "strong", 1.0, 0.0, 0.0)
    turns = [[0.4] * 12] * 3
    assert (
        limit("strong", base, point(4, turns, batch=64, compute_s=0.25, other_s=0.13, exposed_comm_s=0.02))
        == "contention"
    )


def test_where_communication_is_not_measured_apart_the_limit_says_so():
    base = parts(1, "strong", 1.0, 0.0, 0.0)
    largest = dataclasses.replace(parts(4, "strong", 0.5, 0.0, 0.0), exposed_comm_s=None, strategy="pipeline")
    assert limit("strong", base, largest) == "computing or communication"
    assert "micro-batches" in advice("computing or communication", largest)


def test_input_that_takes_a_third_everywhere_limits_an_ideal_curve():
    assert limit("weak", parts(1, "weak", 0.7, 0.0, 0.3), parts(8, "weak", 0.7, 0.0, 0.3)) == "input"


def test_one_point_has_no_limit():
    only = parts(2, "strong", 1.0, 0.5, 0.0)
    assert limit_of("strong", only, curve_points([only])[0]) == ""


def test_lost_shares_add_up_to_the_lost_efficiency():
    base, largest = parts(1, "strong", 1.0, 0.0, 0.1), parts(4, "strong", 0.3, 0.12, 0.05)
    lost = sum(lost_shares("strong", base, largest).values())
    assert 1 - lost == pytest.approx(curve_points([base, largest])[1].efficiency.value)


STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "gossip", "async_sgd")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_limit_but_none_has_advice_whose_keys_exist(strategy: str):
    known = known_keys()
    sections = {key.partition(".")[0] for key in known}
    for name in WORDS:
        for steps in (1, 4):
            largest = dataclasses.replace(
                parts(4, "strong", 0.3, 0.1, 0.0), strategy=strategy, accumulation_steps=steps
            )
            text = advice(name, largest)
            assert bool(text) == (name != "nothing yet")
            words = [word.strip("(),;") for word in text.split()]
            keys = [word for word in words if "." in word and word.partition(".")[0] in sections]
            assert all(key in known for key in keys), keys


def test_advice_follows_the_strategy():
    largest = parts(4, "strong", 0.3, 0.1, 0.0)
    assert "buckets" in advice("communication", largest)
    assert "HSDP" in advice("communication", dataclasses.replace(largest, strategy="fsdp"))
    assert "16 samples per worker" in advice("compute", largest)
