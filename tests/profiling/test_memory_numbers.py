"""The allocator's books in four numbers, from statistics with known answers."""

from __future__ import annotations

import pytest

from scaleray.records.profile_record import MemoryPeak
from scaleray.training.profile.memory_curve import MOST_SAMPLES, memory_over_time, numbers_of, thinned

MIB = 2**20
STATS = {
    "requested_bytes.all.current": 94 * MIB,
    "allocated_bytes.all.current": 100 * MIB,
    "active_bytes.all.current": 104 * MIB,  # four wait for another stream, and are counted as asked for till then
    "reserved_bytes.all.current": 160 * MIB,
    "inactive_split_bytes.all.current": 16 * MIB,
    "num_alloc_retries": 3,
}
SEGMENTS = [
    {"blocks": [{"size": 104 * MIB, "state": "active_allocated"}, {"size": 10 * MIB, "state": "inactive"}]},
    {"blocks": [{"size": 6 * MIB, "state": "inactive"}, {"size": 99 * MIB, "state": "active_awaiting_free"}]},
    {"blocks": [{"size": 40 * MIB, "state": "inactive"}]},
]


def test_four_numbers_say_for_which_reason_memory_is_held():
    assert numbers_of(STATS, SEGMENTS) == {
        "rounding_bytes": 10 * MIB,
        "cached_bytes": 56 * MIB,
        "stranded_bytes": 16 * MIB,
        "largest_hole_bytes": 40 * MIB,
        "retries": 3,
    }


def test_what_the_books_do_not_have_is_not_0():
    assert set(numbers_of({}).values()) == {None}
    without = {name: value for name, value in STATS.items() if not name.startswith("requested")}
    assert numbers_of(without)["rounding_bytes"] is None and numbers_of(without)["cached_bytes"] == 56 * MIB
    assert numbers_of(STATS)["largest_hole_bytes"] is None
    assert numbers_of(STATS, [])["largest_hole_bytes"] == 0, "a snapshot without a free block has none"


def test_over_time_a_bucket_has_the_most_of_its_samples_and_none_without_one():
    samples = [
        (1, {"resident_bytes": 5}),
        (3, {"resident_bytes": 7}),
        (4, {"resident_bytes": 6}),
        (9, {"resident_bytes": 4}),
    ]
    peak = MemoryPeak(8, 3, "backward", 1.0)
    found = memory_over_time(samples, peak=peak, first_step=2, width=2, count=4)
    assert found.resident_bytes == 4 and found.peak is peak
    assert found.series == {"resident_bytes": [7, 6, None, 4]}
    assert found.rounding_bytes is None and found.stranded_bytes is None


@pytest.mark.parametrize("num", [1, MOST_SAMPLES, MOST_SAMPLES + 1])
def test_samples_are_never_too_many(num):
    samples = [(step, {}) for step in range(num)]
    kept = thinned(samples)
    assert len(kept) <= MOST_SAMPLES and kept[0] == samples[0]
