"""What a collective puts on the busiest link, and how fast that is."""

from __future__ import annotations

import pytest

from scaleray.profiling.collectives import bus_bytes, layer_range, with_bandwidth
from scaleray.records.profile_record import CollectiveRow


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("all_reduce", 150.0), ("all_gather", 300.0), ("reduce_scatter", 75.0), ("broadcast", 100.0), ("send", 100.0)],
)
def test_bytes_on_a_link_follow_from_the_operation_and_the_groups_own_size(operation, expected):
    assert bus_bytes(operation, 100.0, 4) == expected
    assert bus_bytes(operation, 100.0, 1) == 0.0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_of_the_shards():
    for size in (2, 3, 8, 1000):
        both = bus_bytes("reduce_scatter", 120.0, size) + bus_bytes("all_gather", 120.0 / size, size)
        assert bus_bytes("all_reduce", 120.0, size) == pytest.approx(both)


def test_bandwidth_leaves_out_the_wait_for_ranks_that_had_not_come():
    row = CollectiveRow(0, "dp", 4, "all_reduce", 10, 1000.0, seconds=2.0)
    assert with_bandwidth(row).bus_bandwidth == 750.0
    assert with_bandwidth(row, waited_s=1.0).bus_bandwidth == 1500.0
    assert with_bandwidth(row, waited_s=2.0).bus_bandwidth is None
    untimed = CollectiveRow(0, "dp", 4, "all_reduce", 10, 1000.0)
    assert with_bandwidth(untimed) == untimed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["blocks.0.a.weight", "blocks.1.weight", "blocks.2.b.bias", "head.weight"], "blocks.0-2, head"),
        (["encoder.layers.5.attention.weight", "encoder.layers.7.bias"], "encoder.layers.5, encoder.layers.7"),
        (["0.weight", "1.weight", "4.bias"], "0-1, 4"),
        (["scale"], "scale"),
        ([], ""),
        ([f"part{n}.weight" for n in range(9)], "part0, part1, part2, 6 more"),
    ],
)
def test_layers_are_named_as_a_person_would(names, expected):
    assert layer_range(names) == expected
